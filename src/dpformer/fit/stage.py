"""What a stage is: it asks a Curator, or nobody, and makes something of the answers.

    histogram -> transitions -> distil -> dpsgd        each of them may be missing; see `recipe`

The steps of `dpsgd` are checkpointed, so `Run` makes them with `dpsgd.Trainer`; the others are in `statistics_stages`.

A stage sees the outputs of the stages before it and an `Asker`, never people's data. So the outputs are functions of answers
alone, and can be made again from recorded answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dpformer.data.features import encode, feature_columns
from dpformer.fit.recipe import Recipe, TransitionsStageSettings
from dpformer.fit.scorers import popularity_of
from dpformer.models import Ensemble, Network, Recommender, TransitionScorer, build, parse_spec, restore
from dpformer.privacy import Answer, PrivacyPlan
from dpformer.statistics.histogram import HISTOGRAM, frequencies
from dpformer.statistics.prior import Prior
from dpformer.training.clipped_sum import Report


@dataclass(frozen=True)
class Setup:
    """What a stage may know beside answers; all of it is public. seed: of initial weights. prior: released by earlier runs.

    features: of all items, from the declared catalogue; see `item_features`.
    """

    recipe: Recipe
    plan: PrivacyPlan
    items: int
    seed: int
    prior: Prior | None = None
    features: np.ndarray | None = None


def item_features(names: str, catalogue: pl.DataFrame) -> np.ndarray | None:
    """The features that are named, such as "category,price:10", of all items; None without a name."""
    return encode(feature_columns(names, catalogue)) if names else None


@dataclass(frozen=True)
class Outputs:
    """What the stages have made so far: functions of answers alone."""

    histogram: Answer | None = None
    transitions: TransitionScorer | None = None
    network: Network | None = None

    def recommender(self, recipe: Recipe) -> Recommender:
        """The model that is released."""
        statistics = recipe.stage(TransitionsStageSettings)
        if self.network is not None and self.transitions is not None and statistics is not None and statistics.weight:
            return Ensemble.of(self.network, self.transitions, statistics.weight)
        if self.network is not None:
            return self.network
        if self.transitions is not None:
            return self.transitions
        assert self.histogram is not None
        return popularity_of(self.histogram)

    def frequencies(self, users: int) -> Tensor | None:
        """The frequencies of items by the histogram, `[items + 1]`, if there is one."""
        if self.histogram is None:
            return None
        return torch.from_numpy(frequencies(self.histogram, users).probability).float()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Histogram and transitions, for a checkpoint: tensors, and JSON-ready values."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        if self.histogram is not None:
            tensors[HISTOGRAM] = torch.from_numpy(self.histogram.values[HISTOGRAM])
            values[HISTOGRAM] = [self.histogram.noise_std, self.histogram.grid]
        if self.transitions is not None:
            tensors |= {f"transitions.{name}": value for name, value in self.transitions.state_dict().items()}
            values["transitions"] = self.transitions.spec.model_dump(mode="json")
        return tensors, values

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor], values: dict[str, Any]) -> Outputs:
        """What `state` was taken from; other tensors and values are not read."""
        histogram, transitions = None, None
        if HISTOGRAM in values:
            histogram = Answer(HISTOGRAM, {HISTOGRAM: tensors[HISTOGRAM].numpy()}, *values[HISTOGRAM])
        if "transitions" in values:
            scorer = restore(parse_spec(values["transitions"]), part_of(tensors, "transitions"))
            transitions = cast(TransitionScorer, scorer)
        return cls(histogram, transitions)


def part_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


@dataclass(frozen=True)
class Progress:
    """How far a stage is: `done` of `total` parts.

    report: of a step of DP-SGD; not private. speed: in users per second. warning: what people should know before it goes on.
    """

    stage: str
    done: int
    total: int
    plan: PrivacyPlan
    report: Report | None = None
    speed: float = 0.0
    warning: str = ""


def new_network(setup: Setup, frequencies: Tensor | None = None, least_vocabulary: int = 0) -> Network:
    """A network with initial weights from the setup's seed. frequencies: released ones, which it keeps, `[items + 1]`."""
    assert setup.recipe.network is not None
    spec = setup.recipe.network.spec(setup.items, frequencies is not None)
    if spec.vocabulary is not None and spec.vocabulary < least_vocabulary:
        spec = spec.model_copy(update={"vocabulary": least_vocabulary})
    torch.manual_seed(setup.seed)  # initial weights; never the noise
    network = cast(Network, build(spec))
    if network.frequencies is not None and frequencies is not None:
        network.frequencies.copy_(frequencies)
    return network

"""The stages before the steps: the histogram, the transitions, and the network that learns from them."""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dpformer.data import Dataset, Sequences
from dpformer.errors import DPFormerError
from dpformer.fit.distil import distil
from dpformer.fit.recipe import DistilSettings, HistogramSettings, TransitionsSettings
from dpformer.fit.scorers import to_scorer
from dpformer.fit.stage import Outputs, Progress, Setup, Stage, new_network
from dpformer.privacy import Answer, Curator
from dpformer.privacy.query import Asker
from dpformer.statistics.combine import Measured, measure
from dpformer.statistics.histogram import Histogram
from dpformer.statistics.item_selection import ItemCounts
from dpformer.statistics.settings import TransitionSettings


@dataclass(frozen=True)
class HistogramStage:
    """Asks for the item histogram: one answer."""

    setup: Setup
    name = "histogram"

    def run(self, before: Outputs, asker: Asker) -> Generator[Progress, None, Outputs]:
        """Ask."""
        answer = self.ask(asker)
        yield Progress(self.name, 1, 1, self.setup.plan)
        return replace(before, histogram=answer)

    def ask(self, asker: Asker) -> Answer:
        """The histogram, combined with that of the prior."""
        answer, prior = asker.ask(Histogram(self.setup.items)), self.setup.prior
        return answer if prior is None else prior.with_histogram(answer, self.setup.plan.users)


@dataclass(frozen=True)
class TransitionsStage:
    """Asks for the transitions and scores by them: three answers, each for cells where the one before saw more than noise."""

    setup: Setup
    name = "transitions"

    def run(self, before: Outputs, asker: Asker) -> Generator[Progress, None, Outputs]:
        """Ask, then combine the answers."""
        scorer = to_scorer(self.measured(before, asker), TransitionSettings())
        yield Progress(self.name, 1, 1, self.setup.plan)
        return replace(before, transitions=scorer)

    def measured(self, before: Outputs, asker: Asker) -> Measured:
        """The transitions, combined with those of the prior."""
        assert before.histogram is not None
        answers = measure(asker, before.histogram, TransitionSettings(), self._sigma(before))
        prior = self.setup.prior
        return answers if prior is None else prior.with_counts(answers, self.setup.plan.users)

    def _sigma(self, before: Outputs) -> float:
        """The noise multiplier of the transitions if they were one answer beside a histogram of the usual share."""
        recipe = self.setup.recipe
        histogram, own = recipe.stage(HistogramSettings), recipe.stage(TransitionsSettings)
        assert histogram is not None
        assert own is not None
        assert before.histogram is not None
        whole = before.histogram.noise_std * histogram.share**0.5  # of the whole budget
        return whole / (own.share / USUAL_SHARE) ** 0.5


USUAL_SHARE = 0.97
"""Of the budget, for the transitions where there are no steps: the size of the head was chosen for it."""


@dataclass(frozen=True)
class DistilStage:
    """Trains a new network on what the transitions say. It asks for nothing."""

    setup: Setup
    name = "distil"

    def run(self, before: Outputs, asker: Asker) -> Generator[Progress, None, Outputs]:
        """Train."""
        settings = self.setup.recipe.stage(DistilSettings)
        assert before.transitions is not None
        assert settings is not None
        network = new_network(self.setup, self._frequencies(before))
        for step in distil(network, before.transitions, settings.steps):
            yield Progress(self.name, step, settings.steps, self.setup.plan)
        return replace(before, network=network)

    def _frequencies(self, before: Outputs) -> Tensor | None:
        """Of a network that is released alone, which answers empty histories by them; beside transitions it does not."""
        statistics = self.setup.recipe.stage(TransitionsSettings)
        assert statistics is not None
        return None if statistics.weight else before.frequencies(self.setup.plan.users)


def stages_before_steps(setup: Setup) -> list[Stage]:
    """The stages of a recipe, in order, without its steps."""
    made: dict[str, Stage] = {
        "histogram": HistogramStage(setup),
        "transitions": TransitionsStage(setup),
        "distil": DistilStage(setup),
    }
    return [made[settings.stage] for settings in setup.recipe.stages if settings.stage in made]


def choose_items(curator: Curator[Sequences], dataset: Dataset) -> Dataset:
    """The data with a catalogue that may be named: of a private one the items that the Curator chooses, numbered anew."""
    if dataset.catalogue_mode != "private" or not curator.plan.private:
        return dataset
    answer = curator.ask(ItemCounts(dataset.catalogue["item_id"].to_list()))
    if not answer.labels:
        raise DPFormerError(
            "no item has enough users to be named privately (--catalogue private); give a public list with --catalogue FILE, or "
            "a larger epsilon. What was asked stays spent"
        )
    return restrict(curator, dataset, answer.labels)


def restrict(curator: Curator[Sequences], dataset: Dataset, labels: Collection[Any]) -> Dataset:
    """The data and the Curator's people with these items only."""
    chosen = dataset.with_items(labels)
    numbers = dataset.numbers_in(chosen.catalogue)
    curator.replace_events(lambda people: people.renumbered(numbers))
    return chosen

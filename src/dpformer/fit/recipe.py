"""Everything that can be chosen about a run: the budget, the network, and the stages that make the model.

A stage is `histogram`, `transitions`, `distil` or `dpsgd`, in this order; `presets` has the usual lists. A recipe is checked
whenever it is made, from a preset or from a stored file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dpformer.models import ReAttention, TransformerSpec, parse_spec
from dpformer.models.network import NetworkSpec
from dpformer.models.recommender import kinds
from dpformer.privacy import PrivacyPlan, make_plan
from dpformer.privacy.plan import declared_users
from dpformer.statistics.histogram import HISTOGRAM
from dpformer.statistics.item_selection import ITEMS
from dpformer.statistics.settings import TransitionSettings

# A private catalogue's part of the budget, and of delta for its threshold.
ITEMS_SHARE, THRESHOLD_SHARE = 0.05, 0.1
# Steps with the default batch: a quarter of few users, half of more, and this many of very many.
FEW_USERS, LARGEST_BATCH = 15_000, 16_000


class Settings(BaseModel):
    """A group of settings: frozen, without unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tuning(Settings):
    """How settings were chosen, for the statement. configurations: every one that was tried, for the kind `listed`."""

    kind: Literal["undeclared", "none", "public", "listed"] = "undeclared"
    configurations: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Tuning:
        if (self.kind == "listed") != bool(self.configurations):
            raise ValueError("kind 'listed' goes with configurations = [...], every one that was tried on this data")
        return self


TRANSFORMER_ONLY = ("blocks", "norm", "recency", "reattention")


class NetworkSettings(Settings):
    """The network that `distil` and `dpsgd` train."""

    model: str = Field("transformer", description="The kind of network.")
    max_length: int = Field(50, ge=1, le=10**6, description="Items of a history that are used, from its end.")
    d: int = Field(32, ge=1, le=2**14, description="Width of embeddings and hidden states.")
    blocks: int = Field(1, ge=1, le=256, description="Transformer blocks.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout; hurts under noise.")
    norm: Literal["pre", "post"] = Field("pre", description="Where layer norm stands in a Transformer block.")
    recency: float | None = Field(
        None,
        ge=0,
        description="Power of a fixed decay of attention with the lag, in place of learned positions; layers start as identity.",
    )
    vocabulary: int | None = Field(
        None,
        ge=1,
        description="Learn only so many of the most frequent items (`distil`: at least the head), with log popularity as bias.",
    )
    tied: bool = Field(True, description="Share the embedding between input and output.")
    reattention: Literal["logits", "literal", "none", "accumulated", "off"] = Field(
        "off", description="Re-Attention's correction; accumulated: by the noise that the steps have added up to."
    )

    @field_validator("recency", "vocabulary", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "none" else value  # TOML has no null

    @field_validator("model")
    @classmethod
    def _registered(cls, value: str) -> str:
        if value not in (there := kinds(NetworkSpec)):
            raise ValueError(f"must be one of {', '.join(there)}")
        return value

    @model_validator(mode="after")
    def _of_transformer(self) -> NetworkSettings:
        for name in TRANSFORMER_ONLY if self.model != "transformer" else ():
            if getattr(self, name) != NetworkSettings.model_fields[name].default:
                raise ValueError(f"{name} is for the transformer, not for {self.model!r}; leave it out")
        return self

    def spec(self, items: int, frequencies: bool = False) -> NetworkSpec:
        """The network for a catalogue of so many items. frequencies: see `NetworkSpec`."""
        shared: dict[str, Any] = self.model_dump(include={"max_length", "d", "dropout", "vocabulary", "tied"})
        shared |= {"items": items, "frequencies": frequencies}
        if self.model != "transformer":
            return cast(NetworkSpec, parse_spec({"kind": self.model, **shared}))
        correction = None
        if self.reattention == "accumulated":
            correction = ReAttention(error="accumulated")
        elif self.reattention != "off":
            correction = ReAttention(self.reattention)
        own: dict[str, Any] = self.model_dump(include={"blocks", "norm", "recency"})
        return TransformerSpec(**shared, **own, identity=self.recency is not None, reattention=correction)


class HistogramSettings(Settings):
    """The item histogram: popularity, the vocabulary, the head of the transitions, Re-Attention's frequencies."""

    stage: Literal["histogram"] = "histogram"
    share: float = Field(0.03, gt=0, le=1, description="Part of the budget for the item histogram.")

    def shares(self) -> dict[str, float]:
        """The answers that the stage asks for, and their parts of the budget."""
        return {HISTOGRAM: self.share}


class TransitionsStageSettings(Settings):
    """What follows what, over the most frequent items."""

    stage: Literal["transitions"] = "transitions"
    share: float = Field(0.97, gt=0, le=1, description="Part of the budget for the transitions.")
    weight: float = Field(
        0.5, ge=0, description="Weight of the transitions' scores beside the network's; 0 leaves the network alone."
    )

    def shares(self) -> dict[str, float]:
        """The answers that the stage asks for, and their parts of the budget."""
        return TransitionSettings().shares(self.share)


class DistilSettings(Settings):
    """The network learns what the transitions say. No data is used, so it costs no budget."""

    stage: Literal["distil"] = "distil"
    steps: int = Field(120, ge=1, le=10**6, description="Steps by which the network learns the transitions' scores.")

    def shares(self) -> dict[str, float]:
        """The stage asks for nothing."""
        return {}


class DPSGDSettings(Settings):
    """Steps of DP-SGD on the network, with what is left of the budget."""

    stage: Literal["dpsgd"] = "dpsgd"
    batch_size: int | None = Field(
        None,
        ge=1,
        description="Expected users per batch; by default half, at most 16,000; a quarter below 15,000 users.",
    )
    epochs: float | None = Field(
        None, gt=0, description="Epochs; by default 40, or 20 below 15,000 users, and at most 80 steps of 16,000 users."
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate of Adam; 0.19 / sqrt(steps) by default."
    )
    max_norm: float | None = Field(
        None, gt=0, description="Clip gradients to this norm (flat clipping); by default they are normalised to norm 1."
    )

    def batch_of(self, users: int) -> int:
        """The expected batch size for so many users, which is public.

        Few users: smaller batches; many: larger ones, up to where noise no longer decides. docs/statistics.md has the runs.
        """
        usual = users // 4 if users < FEW_USERS else min(users // 2, LARGEST_BATCH)
        return min(self.batch_size or max(1, usual), users)

    def epochs_of(self, users: int) -> float:
        """The epochs for so many users: by default 80 steps of the default batch; 40 or 20 with a given one."""
        usual = 20.0 if users < FEW_USERS else 40.0
        return self.epochs or min(usual, usual if self.batch_size else 80.0 * LARGEST_BATCH / users)

    def shares(self) -> dict[str, float]:
        """The steps take what the shares of the other stages leave."""
        return {}


StageSettings = Annotated[
    HistogramSettings | TransitionsStageSettings | DistilSettings | DPSGDSettings, Field(discriminator="stage")
]
STAGES: dict[str, type[Settings]] = {
    "histogram": HistogramSettings,
    "transitions": TransitionsStageSettings,
    "distil": DistilSettings,
    "dpsgd": DPSGDSettings,
}
S = TypeVar("S", bound=Settings)


class Recipe(Settings):
    """How a model is made from sequences and a budget. Make one with `presets.make_recipe`."""

    epsilon: float = Field(8.0, gt=0, allow_inf_nan=True, description="The budget; inf trains without privacy.")
    delta: float = Field(1e-5, gt=0, lt=1, description="Must be below 1 / users.")
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="Research only: noise from a given seed, which anyone can subtract; marked insecure.",
    )
    population: int | None = Field(
        None,
        ge=2,
        description="A public number of users for rate and delta, in place of the number in the data; not below it.",
    )
    hold_out: Literal["validation", "test", "nothing"] = Field(
        "validation",
        description="What training does not see: the validation item and the test item, the test item, or nothing.",
    )
    tuning: Tuning = Field(
        Tuning(), description="How settings were chosen, for the statement: none means fixed beforehand."
    )
    network: NetworkSettings | None = None
    stages: tuple[StageSettings, ...]

    @field_validator("tuning", mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _stages_fit(self) -> Recipe:
        names = [stage.stage for stage in self.stages]
        if not names or names != [name for name in STAGES if name in names]:
            raise ValueError(f"stages {names} must be some of {', '.join(STAGES)}, each once, in this order")
        if "transitions" in names and "histogram" not in names:
            raise ValueError("stage transitions needs the stage histogram before it")
        if "distil" in names and "transitions" not in names:
            raise ValueError("stage distil needs the stage transitions before it")
        if (self.network is not None) != bool({"distil", "dpsgd"} & set(names)):
            raise ValueError("a network goes with the stages distil and dpsgd, and with no others")
        if math.isinf(self.epsilon) and set(names) - {"histogram"} != {"dpsgd"}:
            raise ValueError("without privacy (epsilon inf) there are steps alone: take preset dpformer or paper")
        total = sum(self.shares().values())
        if "dpsgd" in names and total >= 1:
            raise ValueError(f"the shares of the stages sum to {total:g} and leave nothing for the steps; lower one")
        if "dpsgd" not in names and not math.isclose(total, 1):
            raise ValueError(f"the shares of the stages sum to {total:g}; without steps they must sum to 1")
        return self

    @model_validator(mode="after")
    def _network_fits(self) -> Recipe:
        network, histogram = self.network, self.stage(HistogramSettings)
        if network is None:
            return self
        if network.vocabulary is not None and histogram is None:
            raise ValueError("a vocabulary needs item frequencies: add the stage histogram")
        if network.reattention != "off" and (histogram is None or self.stage(DPSGDSettings) is None):
            raise ValueError(
                "reattention corrects the noise of steps and needs item frequencies: stages histogram, dpsgd"
            )
        return self

    def stage(self, kind: type[S]) -> S | None:
        """The settings of a stage, if the recipe has it."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """The recipe with other values, by dotted names such as `network.d`; groups that the recipe lacks are left out."""
        values = self.model_dump()
        groups = {"": values, "network": values["network"], **{stage["stage"]: stage for stage in values["stages"]}}
        for name, value in changes.items():
            group, _, key = name.rpartition(".")
            if group not in {"", "network", *STAGES}:
                raise KeyError(f"{name} has no group of settings")
            if groups.get(group) is not None:
                groups[group][key] = value
        return Recipe.model_validate(values)

    @property
    def steps_on_data(self) -> bool:
        """Whether there are steps of DP-SGD, which several processes can share."""
        return self.stage(DPSGDSettings) is not None

    def shares(self) -> dict[str, float]:
        """The statistics that are asked for, in order, and their parts of the budget."""
        return {name: share for stage in self.stages for name, share in stage.shares().items()}

    def settings(self) -> dict[str, Any]:
        """All settings, ready for JSON; an infinite epsilon is "inf"."""
        return self.model_dump(mode="json") | {"epsilon": self.epsilon if math.isfinite(self.epsilon) else "inf"}

    def plan(self, users: int, private_catalogue: bool = False) -> PrivacyPlan:
        """The privacy plan for so many users in the data; the first answer chooses the items of a private catalogue."""
        users = declared_users(users, self.population)
        choose = private_catalogue and math.isfinite(self.epsilon)
        shares, batch, epochs = self.shares(), users, None
        if (steps := self.stage(DPSGDSettings)) is not None:
            batch, epochs = steps.batch_of(users), steps.epochs_of(users)
        if choose:
            shares = {ITEMS: ITEMS_SHARE, **{name: (1 - ITEMS_SHARE) * share for name, share in shares.items()}}
        threshold_delta = THRESHOLD_SHARE * self.delta if choose else 0.0
        declared = self.population is not None
        return make_plan(users, self.epsilon, self.delta, batch, epochs, None, shares, threshold_delta, declared)

"""Everything that can be chosen about a training, validated, in one object and one file."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpformer.errors import DPFormerError
from dpformer.fit.dpsgd import Optimisation
from dpformer.fit.scorers import POPULARITY_SHARES, fit_popularity, fit_transitions
from dpformer.models import Network, Popularity, ReAttention, RecurrentSpec, TransformerSpec, TransitionScorer, build
from dpformer.models.network import NetworkSpec
from dpformer.privacy import Asker, PrivacyPlan, make_plan
from dpformer.statistics.histogram import HISTOGRAM
from dpformer.statistics.item_selection import ITEMS
from dpformer.statistics.settings import TransitionSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A private catalogue's part of the budget, and of delta for its threshold.
ITEMS_SHARE, THRESHOLD_SHARE = 0.05, 0.1
# Before the names of the releases of a network's prior.
PRIOR = "prior: "
# Models without a network: a few one-shot releases, no steps.
STATISTICS: dict[str, Callable[[Asker, int], TransitionScorer | Popularity]] = {
    "transitions": fit_transitions,
    "popularity": fit_popularity,
}


class Recipe(BaseModel):
    """How a model is made from sequences and a budget. Fields are the options of `dpformer fit` and the keys of its file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # the budget
    epsilon: float = Field(8.0, gt=0, allow_inf_nan=True, description="The budget; inf trains without privacy.")
    delta: float = Field(1e-5, gt=0, lt=1, description="Must be below 1 / users.")
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="Research only: noise from a known seed, which anybody can subtract; marked insecure.",
    )
    population: int | None = Field(
        None, ge=2, description="A public number of users for rate and delta, in place of the number in the data."
    )
    histogram_share: float = Field(
        0.05, ge=0, lt=1, description="Part of the budget for the item histogram; 0 for none."
    )
    tuning: Literal["undeclared", "none", "public", "listed"] = Field(
        "undeclared", description="How settings were chosen, for the statement: none means fixed beforehand."
    )
    tried: tuple[str, ...] = Field((), description="For tuning 'listed': every configuration tried on this data.")
    hold_out: Literal["validation", "test", "nothing"] = Field(
        "validation",
        description="What training does not see: the validation item and the test item, the test item, or nothing.",
    )
    # the model
    model: Literal["transformer", "gru", "lstm", "transitions", "popularity"] = Field(
        "transformer", description="What is trained, or which statistics are released."
    )
    max_length: int = Field(50, ge=1, le=10**6, description="Items of a history that are used.")
    d: int = Field(32, ge=1, le=2**14, description="Width of embeddings and hidden states.")
    heads: int = Field(1, ge=1, le=2**14, description="Attention heads.")
    blocks: int = Field(1, ge=1, le=256, description="Transformer blocks.")
    feed_forward: int | None = Field(
        None, ge=1, le=2**16, description="Width of the feed-forward layers; d by default."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout; hurts under noise.")
    norm: Literal["pre", "post"] = Field("pre", description="Where layer norm stands.")
    recency: float | None = Field(
        None, ge=0, description="Fixed decay of attention with the lag, its power, in place of learned positions."
    )
    identity: bool = Field(False, description="Layers start as the identity instead of at random.")
    vocabulary: int | None = Field(
        None, ge=1, description="Learn only so many items, the most frequent of the histogram; all by default."
    )
    popularity_bias: bool = Field(False, description="Log popularity of the histogram as a fixed output bias.")
    tied: bool = Field(True, description="Share the embedding between input and output.")
    reattention: Literal["logits", "literal", "none", "off"] = Field("off", description="Re-Attention's correction.")
    prior_share: float = Field(
        0.0, ge=0, le=1, description="Part of the budget for DP transitions, whose scores are added to the network's."
    )
    prior_weight: float = Field(0.5, ge=0, description="Weight of those scores; 0 leaves the network alone.")
    distil: int = Field(
        0,
        ge=0,
        le=10**6,
        description="Steps by which the network first learns what the prior says; they cost no budget.",
    )
    # the steps
    batch_size: int | None = Field(None, ge=1, description="Expected users in a batch; half of all by default.")
    epochs: float = Field(
        60.0, ge=0, description="How often each user is seen, on average; 0: no steps, the budget is the prior's."
    )
    learning_rate: float = Field(2e-2, gt=0, description="Peak learning rate of Adam.")
    weight_decay: float = Field(1e-5, ge=0, description="Weight decay of Adam.")
    warmup: float = Field(0.2, ge=0, lt=1, description="Share of the steps over which the rate rises.")
    averaging: Literal["none", "ema", "tail"] = Field("tail", description="Average of iterates that is released.")
    max_norm: float = Field(1.0, gt=0, description="Clipping norm C.")
    rule: Literal["automatic", "flat"] = Field("automatic", description="Clipping rule.")
    token_budget: int = Field(
        16384,
        ge=1,
        description="Positions that are worked on at once: memory, not privacy. Two workers side by side have half each.",
    )

    @property
    def window(self) -> int | None:
        """How many of a history's last items a model gets; None for all: a vocabulary comes before the cut."""
        return None if self.model in STATISTICS or self.vocabulary is not None else self.max_length

    def settings(self) -> dict[str, Any]:
        """All settings, ready for JSON; an infinite epsilon is "inf"."""
        return self.model_dump(mode="json") | {"epsilon": self.epsilon if math.isfinite(self.epsilon) else "inf"}

    def plan(self, users: int, private_catalogue: bool = False) -> PrivacyPlan:
        """The privacy plan for so many users in the data; the first answer chooses the items of a private catalogue."""
        users = self.population or users
        select = private_catalogue and math.isfinite(self.epsilon)
        shares, batch, epochs = self._shares(), users, None
        if self.model not in STATISTICS:
            batch, epochs = min(self.batch_size or max(1, users // 2), users), self.epochs or None
        if select:
            shares = {ITEMS: ITEMS_SHARE, **{name: (1 - ITEMS_SHARE) * share for name, share in shares.items()}}
        threshold_delta = THRESHOLD_SHARE * self.delta if select else 0.0
        return make_plan(users, self.epsilon, self.delta, batch, epochs, None, shares, threshold_delta)

    def _shares(self) -> dict[str, float]:
        """The parts of the budget that are not the steps'."""
        if self.model in STATISTICS:
            return TransitionSettings().shares if self.model == "transitions" else POPULARITY_SHARES
        shares = {HISTOGRAM: self.histogram_share} if self.histogram_share else {}
        if self.prior_share:
            shares |= {PRIOR + name: self.prior_share * share for name, share in TransitionSettings().shares.items()}
        return shares

    def optimisation(self) -> Optimisation:
        """The part that the trainer needs."""
        return Optimisation(**self.model_dump(include=set(Optimisation.__dataclass_fields__)))

    def spec(self, items: int) -> NetworkSpec:
        """The network for a catalogue of so many items."""
        shared = {"items": items, "frequencies": bool(self.histogram_share)} | self.model_dump(
            include={"max_length", "d", "tied", "dropout", "vocabulary"}
        )
        if self.model in ("gru", "lstm"):
            return RecurrentSpec(kind=self.model, **shared)
        correction = None if self.reattention == "off" else ReAttention(self.reattention)
        own = self.model_dump(include={"heads", "blocks", "feed_forward", "norm", "recency", "identity"})
        return TransformerSpec(reattention=correction, **shared, **own)

    def build(self, items: int) -> Network:
        """A new network for a catalogue of so many items."""
        network = build(self.spec(items))
        assert isinstance(network, Network)
        return network


# The paper's settings, with one choice of its grid of batch sizes and learning rates.
PAPER = {
    "d": 64,
    "blocks": 2,
    "norm": "post",
    "dropout": 0.2,
    "reattention": "logits",
    "epochs": 100.0,
    "batch_size": 1024,
    "learning_rate": 3e-3,
    "averaging": "none",
    "max_length": 200,
}
# DP-SGD alone: nothing is known beforehand but the noisy histogram. docs/pure.md tells what each setting is worth.
PURE = {
    "histogram_share": 0.03,
    "vocabulary": 1000,
    "popularity_bias": True,
    "recency": 1.2,
    "identity": True,
    "epochs": 20.0,
    "learning_rate": 3.5e-2,
    "averaging": "none",
}
# The same with the transition statistics beside it: which part of the budget they should have depends on the data.
WHOLE = {**PURE, "prior_share": 0.35}
# A split of the budget that is good on all data sets at hand, and the best on none.
JOINED = {**PURE, "prior_share": 0.6, "prior_weight": 1.0}
# The statistics with the whole budget, and a Transformer that learns from them at no further cost: no steps on people's data.
DISTILLED = {
    "histogram_share": 0.0,
    "prior_share": 1.0,
    "prior_weight": 2.0,
    "distil": 120,
    "epochs": 0.0,
    "d": 64,
    "max_length": 30,
    "vocabulary": 1500,
    "recency": 1.2,
    "identity": True,
    "averaging": "none",
}
# What `dpformer fit` and `DPFormer` start from: on all data sets at hand the best, or within the spread of seeds of it
# (docs/results.md). Settings that speak of steps on people's data, or of the budget's other parts, want a network that makes
# such steps.
BEST = DISTILLED
OF_STEPS = frozenset(
    {"epochs", "batch_size", "learning_rate", "warmup", "weight_decay", "averaging", "max_norm", "rule", "dropout"}
    | {"reattention", "histogram_share", "popularity_bias", "prior_share", "distil"}
)
PRESETS: dict[str, dict[str, Any]] = {
    "best": BEST,
    "joined": JOINED,
    "whole": WHOLE,
    "distilled": DISTILLED,
    "pure": PURE,
    "paper": PAPER,
    "default": {},
}


def make_recipe(preset: str = "default", file: Path | None = None, **options: Any) -> Recipe:
    """A recipe from a preset, then a TOML file, then options; an unknown key is an error with a suggestion."""
    if preset not in PRESETS:
        raise DPFormerError(f"no preset is called {preset!r}; there are: {', '.join(PRESETS)}")
    said = {**(_read(file) if file else {}), **options}
    values = {**_start(preset, said), **said}
    if "noise" in values:
        raise DPFormerError(
            "setting 'noise' was removed: there is one noise, exact and from a cipher; leave it out (a seed alone "
            "makes a seeded run)"
        )
    for key in values:
        if key not in Recipe.model_fields:
            near = difflib.get_close_matches(key, Recipe.model_fields, n=1)
            where = f"{file}: " if file and key not in options else ""
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DPFormerError(f"{where}unknown setting {key!r}{hint}")
    try:
        recipe = Recipe(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise DPFormerError(f"setting {first['loc'][0]!r}: {first['msg']}, not {first['input']!r}") from None
    if recipe.model in STATISTICS and recipe.epsilon == float("inf"):
        raise DPFormerError(f"model {recipe.model!r} is released with noise: give a finite epsilon")
    if recipe.prior_share and (recipe.model in STATISTICS or recipe.epsilon == float("inf")):
        raise DPFormerError("prior_share is for a network with a finite epsilon: the prior is made of noisy counts")
    if recipe.epochs and recipe.prior_share + recipe.histogram_share >= 1:
        raise DPFormerError(
            "prior_share and histogram_share leave nothing for the steps: together they must be below 1"
        )
    if (recipe.tuning == "listed") != bool(recipe.tried):
        raise DPFormerError("tuning 'listed' goes with tried = [...], every configuration tried on this data")
    if recipe.model == "transformer" and recipe.d % recipe.heads:
        raise DPFormerError(f"setting 'd': {recipe.d} is not a multiple of heads, {recipe.heads}")
    if recipe.model != "transformer" and recipe.reattention != "off":
        raise DPFormerError(f"reattention is for the transformer, not for {recipe.model!r}; say off")
    if recipe.reattention != "off" and not recipe.histogram_share:
        raise DPFormerError("reattention needs item frequencies: give histogram_share above 0")
    if recipe.distil and not recipe.prior_share:
        raise DPFormerError("distil is for a network with a prior: give prior_share above 0")
    if not recipe.epochs and recipe.model not in STATISTICS and not recipe.distil:
        raise DPFormerError("epochs = 0 leaves the network as it begins: give epochs above 0, or distil")
    if not recipe.epochs and recipe.distil and not math.isclose(recipe.prior_share + recipe.histogram_share, 1):
        raise DPFormerError(
            "with epochs = 0 there are no steps to pay for: prior_share and histogram_share must sum to 1"
        )
    frequent = recipe.histogram_share or recipe.distil  # a network that is distilled takes the prior's head
    if (recipe.vocabulary is not None or recipe.popularity_bias) and not frequent:
        raise DPFormerError("vocabulary and popularity_bias need item frequencies: give histogram_share above 0")
    if recipe.model != "transformer" and (recipe.recency is not None or recipe.identity):
        raise DPFormerError(f"recency and identity are for the transformer, not for {recipe.model!r}")
    if recipe.model in STATISTICS and (recipe.vocabulary is not None or recipe.popularity_bias):
        raise DPFormerError(f"vocabulary and popularity_bias are for networks, not for {recipe.model!r}")
    return recipe


def _start(preset: str, said: dict[str, Any]) -> dict[str, Any]:
    """What a preset says, less what cannot go with what was asked for: a prior is of noisy counts.

    `best` is of a Transformer, and of one with steps (`joined`) if something that was asked for is about steps.
    """
    without_noise = said.get("epsilon") in (float("inf"), "inf")
    if preset == "best":
        if said.get("model", "transformer") != "transformer":
            return {}
        steps = without_noise or (OF_STEPS & said.keys() and said.get("epochs") not in (0, "0"))
        preset = "joined" if steps else preset
    if preset == "distilled" and without_noise:
        raise DPFormerError("preset 'distilled' has nothing but statistics, released with noise: give a finite epsilon")
    of_prior = ("prior_share", "prior_weight", "distil")
    return {key: value for key, value in PRESETS[preset].items() if not (without_noise and key in of_prior)}


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DPFormerError(f"{file}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DPFormerError(f"{file}: is not TOML ({error})") from None

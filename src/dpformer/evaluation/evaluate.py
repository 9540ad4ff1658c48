"""All figures of one model on one held-out item."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from dpformer import notebook
from dpformer.data import HeldOut
from dpformer.evaluation.metrics import CUTOFFS, HEADLINE, Figure, metrics
from dpformer.evaluation.ranking import Ranks, rank
from dpformer.models.top import Scorer

SLICES = {"head": 0.5, "torso": 0.8, "tail": 1.0}
"""Items by popularity: the most frequent that make up half of the events, those up to 80 %, and the others."""


@dataclass(frozen=True)
class Protocol:
    """item, asked, without: of `HeldOut`; users and items: how many were evaluated and ranked; left_out: users who cannot be.

    drawn_from: the users that the evaluated ones were drawn from.
    """

    item: str
    users: int
    items: int
    left_out: int
    asked: str
    without: str
    drawn_from: int

    def line(self) -> str:
        """One line, for a table's foot or a model card."""
        short = f" ({self.left_out:,} users {self.without} left out)" if self.left_out else ""
        who = f"all {self.users:,} users{short}, no sampling"
        if self.users < self.drawn_from:
            who = f"{self.users:,} users, drawn uniformly from {self.drawn_from:,}{short}"
        return (
            f"{self.item} item: {self.asked}; all {self.items:,} items ranked for {who}; items of the history masked unless said "
            "otherwise, ties count against the model; 95 % intervals by bootstrap over users"
        )


@dataclass(frozen=True)
class Slice:
    """The users whose target is in one class of items. items: how many there are; users: with such a target."""

    items: int
    users: int
    metrics: dict[str, Figure]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Figures as fractions of 1.

    masked, unmasked: the metrics with the items of the history taken out, and without. slices: masked, by the popularity
    of the target. coverage: the share of the catalogue in at least one user's top k. mean_popularity: events of a recommended
    item per user, in the mean over all top-k lists. ranks: masked, int64 [users], for `difference`.
    These figures come from people's data without noise: they are not private.
    """

    protocol: Protocol
    masked: dict[str, Figure]
    unmasked: dict[str, Figure]
    slices: dict[str, Slice]
    coverage: dict[str, float]
    mean_popularity: dict[str, float]
    ranks: np.ndarray = field(repr=False)

    def figures(self) -> dict[str, Any]:
        """Ready for JSON, the protocol beside the figures; None for a mean over no users."""
        plain = _plain(asdict(self))
        del plain["ranks"]
        return {**plain, "protocol": self.protocol.line()}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name.upper()} {100 * self.masked[name].value:.2f} %" for name in HEADLINE)
        return f"<Evaluation: {shown}; {self.protocol.item} item of {self.protocol.users:,} users; not private>"

    def _repr_html_(self) -> str:
        kinds = {"items of the history masked": self.masked, "unmasked": self.unmasked}
        kinds |= {f"{name} targets ({part.users:,} users)": part.metrics for name, part in self.slices.items()}
        rows = [(kind, *(of_kind[name].text() for name in HEADLINE)) for kind, of_kind in kinds.items()]
        notes = (self.protocol.line(), "Computed on people's data without noise: not private.")
        return notebook.table("Evaluation, in %", ("", *(name.upper() for name in HEADLINE)), rows, notes)


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def evaluate(
    model: Scorer,
    held: HeldOut,
    item_count: int,
    *,
    seed: int = 0,
    cutoffs: Sequence[int] = (),
    sample: int | None = None,
    on_progress: Callable[[int], None] = lambda users: None,
    threads: int = 1,
) -> Evaluation:
    """Rank all items for every evaluated user. Popularity is counted in the histories.

    seed: of the bootstrap and of the sample. cutoffs: beside 5, 10 and 20. sample: evaluate so many users, drawn uniformly;
    the same for every model.
    """
    cutoffs, everyone = sorted({*CUTOFFS, *cutoffs}), len(held.evaluated)
    if sample is not None and sample < everyone:
        drawn = np.sort(np.random.default_rng(seed).choice(everyone, sample, replace=False))
        held = replace(held, evaluated=held.evaluated[drawn], targets=held.targets[drawn])
    ranked = rank(model, held, item_count, max(cutoffs), on_progress, threads)
    masked, users = ranked["masked"], len(held.histories)
    counts = np.bincount(held.histories.items, minlength=item_count + 1)
    counts[0] = 0
    return Evaluation(
        protocol=Protocol(
            held.item, len(held.evaluated), item_count, users - everyone, held.asked, held.left_out, everyone
        ),
        masked=metrics(masked.ranks, seed, cutoffs),
        unmasked=metrics(ranked["unmasked"].ranks, seed, cutoffs),
        slices=_slices(masked.ranks, held.targets, counts, seed, cutoffs),
        coverage={f"coverage@{k}": _coverage(masked, k, item_count) for k in cutoffs},
        mean_popularity={f"popularity@{k}": _mean_popularity(masked, k, counts / users) for k in cutoffs},
        ranks=masked.ranks,
    )


def popularity_classes(counts: np.ndarray) -> np.ndarray:
    """The class of each item, int64 [items + 1]: 0 head, 1 torso, 2 tail; counts: events of each item, entry 0 is 0.

    An item belongs where the share of events of the items before it, in the order of popularity, falls.
    """
    order = np.argsort(-counts, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(counts[order])[:-1] / max(counts.sum(), 1)])
    classes = np.empty(len(counts), dtype=np.int64)
    classes[order] = np.searchsorted(list(SLICES.values())[:-1], before, side="right")
    return classes


def _slices(
    ranks: np.ndarray, targets: np.ndarray, counts: np.ndarray, seed: int, cutoffs: Sequence[int]
) -> dict[str, Slice]:
    classes = popularity_classes(counts)
    result = {}
    for number, name in enumerate(SLICES):
        chosen = ranks[classes[targets] == number]
        result[name] = Slice(int((classes[1:] == number).sum()), len(chosen), metrics(chosen, seed, cutoffs))
    return result


def _coverage(ranked: Ranks, k: int, item_count: int) -> float:
    shown = np.unique(ranked.lists[:, :k])
    return float((shown > 0).sum()) / item_count


def _mean_popularity(ranked: Ranks, k: int, popularity: np.ndarray) -> float:
    shown = ranked.lists[:, :k]
    return float(popularity[shown[shown > 0]].mean()) if (shown > 0).any() else 0.0

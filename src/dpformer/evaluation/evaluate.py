"""All figures of one model on one held-out item."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpformer import notebook
from dpformer.data import HeldOut
from dpformer.evaluation.metrics import CUTOFFS, HEADLINE, Figure, metrics
from dpformer.evaluation.protocol import Protocol
from dpformer.evaluation.ranking import Ranks, Scorer, rank

SLICES = {"head": 0.5, "torso": 0.8, "tail": 1.0}
"""Items by popularity: the most frequent that make up half of the events, those up to 80 %, and the others."""


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
    item per user, in the mean over all top-k lists. These figures come from people's data without noise: they are not private.
    """

    protocol: Protocol
    masked: dict[str, Figure]
    unmasked: dict[str, Figure]
    slices: dict[str, Slice]
    coverage: dict[str, float]
    mean_popularity: dict[str, float]

    def figures(self) -> dict[str, Any]:
        """Ready for JSON, the protocol beside the figures; None for a mean over no users."""
        return {**_plain(asdict(self)), "protocol": self.protocol.line()}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name.upper()} {100 * self.masked[name].value:.2f} %" for name in HEADLINE)
        return f"<Evaluation: {shown}; {self.protocol.item} item of {self.protocol.users:,} users; not private>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        kinds = {"items of the history masked": self.masked, "unmasked": self.unmasked}
        kinds |= {f"{name} targets ({part.users:,} users)": part.metrics for name, part in self.slices.items()}
        rows = [(kind, *(found[name].text() for name in HEADLINE)) for kind, found in kinds.items()]
        notes = (self.protocol.line(), "Computed on people's data without noise: not private.")
        return notebook.table("Evaluation, in %", ("", *(name.upper() for name in HEADLINE)), rows, notes)


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def evaluate(model: Scorer, held: HeldOut, item_count: int, *, seed: int = 0) -> Evaluation:
    """Rank all items for every evaluated user. Popularity is counted in the histories. `seed` is of the bootstrap."""
    ranked = rank(model, held, item_count)
    counts = np.bincount(held.histories.items, minlength=item_count + 1)
    counts[0] = 0
    users = len(held.histories)
    return Evaluation(
        protocol=Protocol(
            held.item, len(held.evaluated), item_count, users - len(held.evaluated), held.asked, held.left_out
        ),
        masked=metrics(ranked["masked"].ranks, seed),
        unmasked=metrics(ranked["unmasked"].ranks, seed),
        slices=_slices(ranked["masked"].ranks, held.targets, counts, seed),
        coverage={f"coverage@{k}": _coverage(ranked["masked"], k, item_count) for k in CUTOFFS},
        mean_popularity={f"popularity@{k}": _mean_popularity(ranked["masked"], k, counts / users) for k in CUTOFFS},
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


def _slices(ranks: np.ndarray, targets: np.ndarray, counts: np.ndarray, seed: int) -> dict[str, Slice]:
    classes = popularity_classes(counts)
    result = {}
    for number, name in enumerate(SLICES):
        chosen = ranks[classes[targets] == number]
        result[name] = Slice(int((classes[1:] == number).sum()), len(chosen), metrics(chosen, seed))
    return result


def _coverage(ranked: Ranks, k: int, item_count: int) -> float:
    shown = np.unique(ranked.lists[:, :k])
    return float((shown > 0).sum()) / item_count


def _mean_popularity(ranked: Ranks, k: int, popularity: np.ndarray) -> float:
    shown = ranked.lists[:, :k]
    return float(popularity[shown[shown > 0]].mean()) if (shown > 0).any() else 0.0

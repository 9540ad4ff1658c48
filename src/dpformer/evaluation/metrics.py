"""NDCG, HIT and MRR from the place of one relevant item, with bootstrap confidence intervals."""

from dataclasses import dataclass

import numpy as np

CUTOFFS = (5, 10, 20)
# The metrics that tables and reports show.
HEADLINE = ("ndcg@10", "hit@10")
_DEEPEST = max(CUTOFFS)
_RESAMPLES, _CONFIDENCE = 2000, 0.95


@dataclass(frozen=True)
class Figure:
    """A mean over users and its 95 % interval (percentile bootstrap over users)."""

    value: float
    low: float
    high: float

    def text(self) -> str:
        """In percent, the interval beside it."""
        return f"{100 * self.value:.2f} [{100 * self.low:.2f}, {100 * self.high:.2f}]"


def _gains() -> dict[str, np.ndarray]:
    """What a user adds to each metric, by the target's place: float64 [21] for places 0..19 and beyond.

    With one relevant item at place r (0 is the top): NDCG@k = 1 / log2(r + 2), HIT@k = 1, MRR@k = 1 / (r + 1), if r < k, else 0.
    """
    place = np.arange(_DEEPEST + 1)
    kinds = {"ndcg": 1 / np.log2(place + 2), "hit": np.ones(_DEEPEST + 1), "mrr": 1 / (place + 1)}
    return {f"{kind}@{k}": np.where(place < k, gain, 0.0) for kind, gain in kinds.items() for k in CUTOFFS}


def metrics(ranks: np.ndarray, seed: int = 0) -> dict[str, Figure]:
    """All metrics of the users with these ranks, int64 [n], 0 for the top.

    A user's metrics depend on min(rank, 20) alone, so that drawing n users with replacement is drawing the counts of 21
    places from a multinomial distribution: the bootstrap is exact, and takes no time.
    """
    gains = _gains()
    if len(ranks) == 0:
        return dict.fromkeys(gains, Figure(float("nan"), float("nan"), float("nan")))
    share = np.bincount(np.minimum(ranks, _DEEPEST), minlength=_DEEPEST + 1) / len(ranks)
    drawn = np.random.default_rng(seed).multinomial(len(ranks), share, _RESAMPLES) / len(ranks)
    tails = [50 * (1 - _CONFIDENCE), 50 * (1 + _CONFIDENCE)]
    result = {}
    for name, gain in gains.items():
        low, high = np.percentile(drawn @ gain, tails)
        result[name] = Figure(float(share @ gain), float(low), float(high))
    return result

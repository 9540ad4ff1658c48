"""NDCG, HIT and MRR from the place of one relevant item, with bootstrap confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CUTOFFS = (5, 10, 20)
# The metrics that tables and reports show.
HEADLINE = ("ndcg@10", "hit@10")
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


def _gains(cutoffs: Sequence[int]) -> dict[str, np.ndarray]:
    """What a user adds to each metric, by the target's place: float64 [deepest + 1], the last for all places beyond.

    With one relevant item at place r (0 is the top): NDCG@k = 1 / log2(r + 2), HIT@k = 1, MRR@k = 1 / (r + 1), if r < k, else 0.
    """
    place = np.arange(max(cutoffs) + 1)
    kinds = {"ndcg": 1 / np.log2(place + 2), "hit": np.ones(len(place)), "mrr": 1 / (place + 1)}
    return {f"{kind}@{k}": np.where(place < k, gain, 0.0) for kind, gain in kinds.items() for k in cutoffs}


def metrics(ranks: np.ndarray, seed: int = 0, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, Figure]:
    """All metrics of the users with these ranks, int64 [n], 0 for the top."""
    return _bootstrap(np.minimum(ranks, max(cutoffs)), _gains(cutoffs), seed)


def difference(
    ranks: np.ndarray, others: np.ndarray, seed: int = 0, cutoffs: Sequence[int] = CUTOFFS
) -> dict[str, Figure]:
    """Metrics of `ranks` minus those of `others`, of the same users: the interval is of the difference within a user."""
    size = max(cutoffs) + 1
    pairs = np.minimum(ranks, size - 1) * size + np.minimum(others, size - 1)
    gains = {name: np.subtract.outer(gain, gain).ravel() for name, gain in _gains(cutoffs).items()}
    return _bootstrap(pairs, gains, seed)


def _bootstrap(cases: np.ndarray, gains: dict[str, np.ndarray], seed: int) -> dict[str, Figure]:
    """Means over users of `gain[case]`. cases: int64 [n].

    A user's metrics depend on the case alone, so that drawing n users with replacement is drawing the counts of the cases from a
    multinomial distribution: the bootstrap is exact, and takes no time.
    """
    if len(cases) == 0:
        return dict.fromkeys(gains, Figure(float("nan"), float("nan"), float("nan")))
    present, counts = np.unique(cases, return_counts=True)
    share = counts / len(cases)
    drawn = np.random.default_rng(seed).multinomial(len(cases), share, _RESAMPLES) / len(cases)
    tails = [50 * (1 - _CONFIDENCE), 50 * (1 + _CONFIDENCE)]
    result = {}
    for name, gain in gains.items():
        low, high = np.percentile(drawn @ gain[present], tails)
        result[name] = Figure(float(share @ gain[present]), float(low), float(high))
    return result

"""From released counts to one score matrix. Post-processing: it costs no privacy."""

from dataclasses import dataclass

import numpy as np

from dpformer.statistics.combine import Measured, off_diagonal, popularity_product, z_scores
from dpformer.statistics.features import Predicted
from dpformer.statistics.free_tuning import discounted_gain, split
from dpformer.statistics.low_rank import held_out_low_rank
from dpformer.statistics.posterior import posterior_means
from dpformer.statistics.settings import TransitionSettings

# What the free tuning chooses from. At the least, the lifts decide; at the most, the conditional probabilities do.
CONDITIONAL_WEIGHTS = (30.0, 100.0, 300.0, 1000.0, 3000.0)
FEATURE_WEIGHTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
# Where the count of a cell is this part of its noise, half of what it says beside the features is kept.
HALF_KEPT = 0.05
# A gain that is nearly the best one differs from it by 1 % at most.
NEAR = 0.01


@dataclass(frozen=True)
class Judge:
    """Score matrices made with more noise, and independent counts to judge them by; see `free_tuning`."""

    lifts: np.ndarray
    conditional: np.ndarray
    prior: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, measured: Measured, settings: TransitionSettings) -> "Judge":
        first, counts = split(measured)
        return cls(*_terms(first, settings, folds=2)[:2], popularity_prior(measured, settings), counts)

    def gain(self, scores: np.ndarray) -> float:
        return discounted_gain(scores + self.prior, self.counts)

    def conditional_weight(self) -> float:
        """The least weight of Q that ranks nearly as well as the best.

        The least, since lifts of several items of a history support each other, which a judgement by one item does not see.
        """
        gains = [self.gain(self.lifts + w * self.conditional) for w in CONDITIONAL_WEIGHTS]
        enough = max(gains) - NEAR * abs(max(gains))
        return next(w for w, gain in zip(CONDITIONAL_WEIGHTS, gains, strict=True) if gain >= enough)

    def feature_weight(self, encoded: np.ndarray, head: np.ndarray, conditional: float) -> float:
        """The weight of the scores that features predict that ranks best."""
        M = _centred(self.lifts + conditional * self.conditional)
        predicted = Predicted(encoded, head, M).scores
        return max(FEATURE_WEIGHTS, key=lambda w: self.gain(M + w * predicted))


def score_matrix(measured: Measured, settings: TransitionSettings) -> np.ndarray:
    """M [P, P]: how much item i in the history speaks for item j. The diagonal is 0.

    M = T + w Q, with the lifts T and the conditional probabilities Q of `_terms`, and w by `settings.conditional` or, if that is
    None, by `Judge`. The less noise, the larger w: with many people the order of the scores is that of a mixture of conditional
    probabilities. With few, T is the better one, since lifts of several items add up and noise averages out.
    """
    return _score_matrix(measured, settings, None)[0]


def _score_matrix(
    measured: Measured, settings: TransitionSettings, features: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """M, how much of it is kept beside features, and the weight of what those predict."""
    if not off_diagonal(len(measured.h)).any():
        return np.zeros_like(measured.counts), np.zeros_like(measured.counts), 0.0
    w, beside = settings.conditional, 0.0
    if w is None or features is not None:
        judge = Judge.of(measured, settings)
        w = judge.conditional_weight() if w is None else w
        beside = 0.0 if features is None else judge.feature_weight(features, measured.head, w)
    lifts, conditional, kept = _terms(measured, settings, settings.folds)
    return lifts + w * conditional, kept, beside


def _centred(M: np.ndarray) -> np.ndarray:
    """M without the means of its rows; its diagonal is 0, before and after."""
    return (M - M.sum(1, keepdims=True) / max(len(M) - 1, 1)) * off_diagonal(len(M))


def _terms(measured: Measured, settings: TransitionSettings, folds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """T, the sum of lifts, Q, the conditional probabilities, and K, how much of a cell is kept beside features, [P, P] each.

    With P the popularity product, V the variance and s the first stage's noise, and every term 0 on the diagonal:

        L    rank-32 prediction of the symmetrised z-scores, each cell without itself
        X2   posterior mean of the log-lift, one prior for each bin of P + s L
        X3   the same, binned by L
        E_k  = (C - P) / min sd * k P / (k P + V), the excess over popularity, linearly shrunk
        A4   = 4 asinh(E_10 / 4)      A2 = 2 asinh(E_100 / 2)
        T    = X2 + .5 X3 + .1 A4 + .2 A2 + .3 X2' + .05 A4'
        Q_ij = x_ij / sum_j x_ij, with the posterior mean x of the count in the bins of X2
        K    = x / (x + .05 sqrt(V)): a cell of an item without events is noise alone, so there the features decide.
    """
    C, V, h = measured.counts, measured.variance, measured.h
    P = popularity_product(C, V, h)
    z = z_scores(C, V, P)
    L = held_out_low_rank((z + z.T) / 2, h, settings.rank, settings.ridge, folds)
    mix = settings.mix
    X2, x = _posterior_lift(measured, P, P + measured.noise * L, settings)
    X3, _ = _posterior_lift(measured, P, L, settings)
    A4, A2 = _excess(C, V, P, 10.0, 4.0), _excess(C, V, P, 100.0, 2.0)
    lifts = (
        mix.lift * X2
        + mix.lift_by_rank * X3
        + mix.excess_4 * A4
        + mix.excess_2 * A2
        + mix.lift_t * X2.T
        + mix.excess_4_t * A4.T
    )
    least = np.finfo(float).tiny
    kept = x / np.maximum(x + HALF_KEPT * np.sqrt(V), least)
    return lifts, x / np.maximum(x.sum(1, keepdims=True), least), kept


def _posterior_lift(
    measured: Measured, P: np.ndarray, predictor: np.ndarray, settings: TransitionSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Posterior means of log (x + a P + t s) - log (P + a P + t s), with the mean of P over the cell's bin, and of x."""
    asked = off_diagonal(len(P))
    expected = P[asked]

    def functions(grid: np.ndarray, members: np.ndarray) -> np.ndarray:
        p = float(expected[members].mean())
        floor = settings.prior_counts * p + settings.prior_noise * measured.noise
        return np.stack([np.log(grid + floor) - np.log(p + floor), grid])

    result = np.zeros((2, *P.shape))
    sd = np.sqrt(measured.variance[asked])
    result[:, asked] = posterior_means(measured.counts[asked], sd, predictor[asked], functions)
    return result[0], result[1]


def _excess(C: np.ndarray, V: np.ndarray, P: np.ndarray, k: float, bend: float) -> np.ndarray:
    """bend * asinh(E_k / bend): linear in small excesses, logarithmic in large ones."""
    prior = k * np.maximum(P, 1e-6)
    shrunk = (C - P) / np.sqrt(V.min()) * prior / (prior + V)
    return bend * np.arcsinh(shrunk / bend)


def scorer_arrays(
    measured: Measured, settings: TransitionSettings, features: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The arrays of `models.TransitionScorer`. features: of all items, by `features.encode`; see there for the scores."""
    head, size, items = measured.head, len(measured.head), len(measured.histogram)
    M, kept, beside = _score_matrix(measured, settings, features)
    outside = np.ones(items, dtype=bool)
    outside[0] = outside[head] = False
    order = np.flatnonzero(outside)
    tail, more = np.zeros(items), {}
    if features is None:
        order = order[np.argsort(-measured.histogram[order], kind="stable")]
        tail[order] = -1 - np.arange(len(order))
    else:
        M = _centred(M)
        predicted = Predicted(features, head, M)
        M = kept * (M - predicted.scores)
        more = {"sources": (1 + beside) * predicted.sources, "targets": predicted.targets}
        # A count that is hardly above 0, or below, says no more than that the item is rarer than the head.
        least = measured.h.min() / 10
        tail[order] = settings.popularity * np.log(np.maximum(measured.histogram[order], least) / measured.h.mean())
    tail[0] = -np.inf
    matrix = np.concatenate([M, np.zeros((1, size))])
    floats = {"matrix": matrix, "prior": popularity_prior(measured, settings), "tail": tail, **more}
    return {"head": head, **{name: value.astype(np.float32) for name, value in floats.items()}}


def popularity_prior(measured: Measured, settings: TransitionSettings) -> np.ndarray:
    """The weighted log-popularity of the head, [P]."""
    prior: np.ndarray = settings.popularity * np.log(measured.h / measured.h.mean())
    return prior

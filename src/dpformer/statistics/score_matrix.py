"""From released counts to one score matrix. Post-processing: it costs no privacy."""

import numpy as np

from dpformer.statistics.combine import Measured, off_diagonal, popularity_product, z_scores
from dpformer.statistics.low_rank import held_out_low_rank
from dpformer.statistics.posterior import posterior_means
from dpformer.statistics.settings import TransitionSettings


def score_matrix(measured: Measured, settings: TransitionSettings) -> np.ndarray:
    """M [P, P]: how much item i in the history speaks for item j. The diagonal is 0.

    With P the popularity product, V the variance and s the first stage's noise, and every term 0 on the diagonal:

        L    rank-32 prediction of the symmetrised z-scores, each cell without itself
        X2   posterior mean of the log-lift, one prior for each bin of P + s L
        X3   the same, binned by L
        E_k  = (C - P) / min sd * k P / (k P + V), the excess over popularity, linearly shrunk
        A4   = 4 asinh(E_10 / 4)      A2 = 2 asinh(E_100 / 2)
        M    = X2 + .5 X3 + .1 A4 + .2 A2 + .3 X2' + .05 A4'.
    """
    C, V, h = measured.counts, measured.variance, measured.h
    asked = off_diagonal(len(h))
    if not asked.any():
        return np.zeros_like(C)
    P = popularity_product(C, V, h)
    z = z_scores(C, V, P)
    L = held_out_low_rank((z + z.T) / 2, h, settings.rank, settings.ridge, settings.folds)
    mix = settings.mix
    X2 = _log_lift(measured, P, P + measured.noise * L, settings)
    X3 = _log_lift(measured, P, L, settings)
    A4, A2 = _excess(C, V, P, 10.0, 4.0), _excess(C, V, P, 100.0, 2.0)
    return (
        mix.lift * X2
        + mix.lift_by_rank * X3
        + mix.excess_4 * A4
        + mix.excess_2 * A2
        + mix.lift_t * X2.T
        + mix.excess_4_t * A4.T
    )


def _log_lift(measured: Measured, P: np.ndarray, predictor: np.ndarray, settings: TransitionSettings) -> np.ndarray:
    """The posterior mean of log (x + a P + t s) - log (P + a P + t s), with the mean of P over the cell's bin."""
    asked = off_diagonal(len(P))
    expected = P[asked]

    def log_lift(grid: np.ndarray, members: np.ndarray) -> np.ndarray:
        p = float(expected[members].mean())
        floor = settings.prior_counts * p + settings.prior_noise * measured.noise
        return (np.log(grid + floor) - np.log(p + floor))[None]

    result = np.zeros_like(P)
    sd = np.sqrt(measured.variance[asked])
    result[asked] = posterior_means(measured.counts[asked], sd, predictor[asked], log_lift)[0]
    return result


def _excess(C: np.ndarray, V: np.ndarray, P: np.ndarray, k: float, bend: float) -> np.ndarray:
    """bend * asinh(E_k / bend): linear in small excesses, logarithmic in large ones."""
    prior = k * np.maximum(P, 1e-6)
    shrunk = (C - P) / np.sqrt(V.min()) * prior / (prior + V)
    return bend * np.arcsinh(shrunk / bend)


def scorer_arrays(measured: Measured, settings: TransitionSettings) -> dict[str, np.ndarray]:
    """The four arrays of `models.TransitionScorer`: head, matrix, prior and tail."""
    size, items = len(measured.head), len(measured.histogram)
    matrix = np.zeros((size + 1, size))
    matrix[:size] = score_matrix(measured, settings)
    others = np.ones(items, dtype=bool)
    others[0] = others[measured.head] = False
    order = np.flatnonzero(others)
    order = order[np.argsort(-measured.histogram[order], kind="stable")]
    tail = np.zeros(items)
    tail[order] = -1 - np.arange(len(order))
    tail[0] = -np.inf
    prior = settings.popularity * np.log(measured.h / measured.h.mean())
    floats = {"matrix": matrix, "prior": prior, "tail": tail}
    return {"head": measured.head, **{name: value.astype(np.float32) for name, value in floats.items()}}

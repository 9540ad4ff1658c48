"""The transitions in stages, each asking only where the last saw something, and their answers on one scale.

A user's vector has norm 1 however many cells it fills, so leaving out cells that hold nothing but noise raises what is
said about the others. Everything between two releases is a function of released values.
"""

from dataclasses import dataclass

import numpy as np

from dpformer.privacy.query import Answer, Asker
from dpformer.statistics.histogram import histogram_of
from dpformer.statistics.posterior import posterior_means
from dpformer.statistics.settings import TransitionSettings, stage_name
from dpformer.statistics.transitions import Transitions


@dataclass(frozen=True)
class Measured:
    """What the releases say, in numbers.

    histogram   [item_count + 1], noisy; entry 0 is 0
    head        [P], the items with transitions, most frequent first
    h           [P], their noisy counts, with a floor
    counts      [P, P], estimates of the first stage's transitions
    variance    [P, P], of the noise in them
    noise       standard deviation of a count of cell weight 1 after the first stage
    scales      r_s of each stage (see `measure`)

    The diagonal (an item after itself) is not asked for: its count is 0 and its variance infinite.
    """

    histogram: np.ndarray
    head: np.ndarray
    h: np.ndarray
    counts: np.ndarray
    variance: np.ndarray
    noise: float
    scales: tuple[float, ...]


def measure(asker: Asker, histogram: Answer, settings: TransitionSettings, sigma: float, users: int) -> Measured:
    """Ask for the transitions over the head of a histogram, and put the answers on one scale. sigma, users: see `head_size`.

    Stage s has cell weights A_s and noise std_s, and is taken to say Y_s = r_s A_s C + std_s N(0, 1), where C are the expected
    counts of the first stage, r_1 = 1, and r_s is the regression of Y_s on A_s E[C | Y_1]: users whose weak cells are left
    out say more about the others. Stages are combined by precision,

        C = sum_s r_s A_s Y_s / std_s^2  /  sum_s (r_s A_s)^2 / std_s^2,     Var C = 1 / sum_s (r_s A_s)^2 / std_s^2.
    """
    noisy = histogram_of(histogram)
    items = len(noisy) - 1
    size = min(settings.head_size(sigma, users), items)
    head = 1 + np.argsort(-noisy[1:], kind="stable")[:size]
    # Below the noise a count says nothing: the floor keeps weights and logarithms sane.
    h = np.maximum(noisy[head], 0.3 * histogram.noise_std + 0.5)
    base = (np.outer(h, h) / h.mean() ** 2) ** -settings.cell_power
    np.fill_diagonal(base, 0.0)
    weighted, precision = np.zeros((size, size)), np.zeros((size, size))
    A, believed, scales = base, base, []
    noise = 0.0
    for stage in range(len(settings.stage_shares)):
        query = Transitions(stage_name(stage), items, head, A, settings.last, settings.lags, settings.lag_power)
        answer = asker.ask(query)
        Y, std = answer.values[query.name], answer.noise_std
        noise = noise or std
        r = 1.0 if stage == 0 else _regression(A * believed, Y)
        scales.append(r)
        weighted += r * A * Y / std**2
        precision += (r * A) ** 2 / std**2
        with np.errstate(divide="ignore"):
            variance = 1 / precision
        counts = np.divide(weighted, precision, out=np.zeros_like(weighted), where=precision > 0)
        if stage == 0:
            believed = _first_belief(Y, A, counts, variance, h, std)
        if stage < len(settings.thresholds):
            z = z_scores(counts, variance, popularity_product(counts, variance, h))
            A = base * (z > settings.thresholds[stage])
    return Measured(noisy, head, h, counts, variance, noise, tuple(scales))


def popularity_product(counts: np.ndarray, variance: np.ndarray, h: np.ndarray) -> np.ndarray:
    """P_ij = c h_i h_j, the counts that popularity alone explains; c by least squares with weights 1 / variance."""
    P = np.outer(h, h) / h.sum() ** 2
    total = float((P * P / variance).sum())
    return P * max(float((counts * P / variance).sum()), 0.0) / total if total > 0 else 0.0 * P


def z_scores(counts: np.ndarray, variance: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """(C - P) / sd; 0 on the diagonal."""
    return (counts - expected) / np.sqrt(variance)


def off_diagonal(size: int) -> np.ndarray:
    """Which cells have counts, bool [size, size]."""
    return ~np.eye(size, dtype=bool)


def _first_belief(
    Y: np.ndarray, A: np.ndarray, counts: np.ndarray, variance: np.ndarray, h: np.ndarray, std: float
) -> np.ndarray:
    """E[C | Y_1] by empirical Bayes. In the first answer's own units, A C, all cells have the same noise."""
    asked = off_diagonal(len(h))
    expected = popularity_product(counts, variance, h)
    predictor = (A * expected)[asked]
    mean = posterior_means(Y[asked], np.full(len(predictor), std), predictor, lambda grid, _: grid[None])
    believed = np.zeros_like(Y)
    believed[asked] = mean.reshape(-1) / A[asked]
    return believed


def _regression(x: np.ndarray, y: np.ndarray) -> float:
    """The slope of y on x through 0; 0, and so nothing is learnt from y, where it is not positive."""
    norm = float((x * x).sum())
    return max(float((x * y).sum()) / norm, 0.0) if norm > 0 else 0.0

"""Nonparametric empirical Bayes: what a noisy count was before the noise, judged by all cells that look alike.

Each cell is y = x + N(0, sd^2) with x >= 0 and known sd. Cells are put into bins by a predictor of x that does not depend on
their own noise. Within a bin, x is taken to have one prior on a grid, which is fitted by maximum likelihood (Kiefer
and Wolfowitz 1956) with the EM algorithm, and each cell gets the posterior mean of functions of x.
"""

from collections.abc import Callable

import numpy as np

_SMALLEST_BIN, _BIN_GROWTH = 3000, 1.5
_GRID, _STEPS = 40, 100
# Cells are grouped for the EM algorithm: noise levels 4 % apart, counts a fifth of the noise apart.
_LEVEL, _WIDTH = 0.04, 0.2
_CELLS_AT_ONCE = 1 << 12

Functions = Callable[[np.ndarray, np.ndarray], np.ndarray]


def posterior_means(y: np.ndarray, sd: np.ndarray, predictor: np.ndarray, functions: Functions) -> np.ndarray:
    """E[f(x) | y] for each cell and each function f, [F, n].

    y, sd, predictor: [n]. functions(grid [G], members) gives the values of the functions, [F, G], for the bin that holds the
    cells `members`. Bins hold 3,000 cells where the predictor is largest, and grow by half from one to the next.
    """
    order = np.argsort(-predictor, kind="stable")
    parts, start, size = [], 0, _SMALLEST_BIN
    while start < len(order):
        end = len(order) if start + size >= len(order) else start + size
        members = order[start:end]
        grid = _grid(y[members], sd[members])
        log_prior = _log_prior(y[members], sd[members], grid)
        parts.append(_expectations(y[members], sd[members], grid, log_prior, functions(grid, members)))
        start, size = end, int(size * _BIN_GROWTH)
    result = np.empty((parts[0].shape[0] if parts else 0, len(y)))
    if parts:
        result[:, order] = np.concatenate(parts, axis=1)
    return result


def _grid(y: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """0, and 40 values from a 200th of the smallest noise up to the largest count, evenly spaced in their logarithm."""
    top = max(float(y.max()), 4 * float(sd.max()))
    return np.concatenate([[0.0], np.geomspace(float(sd.min()) / 200, top, _GRID)])


def _log_likelihood(y: np.ndarray, sd: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """log N(y; x, sd^2) up to a constant for each cell, [n, G]."""
    return -0.5 * ((y[:, None] - grid) / sd[:, None]) ** 2


def _log_prior(y: np.ndarray, sd: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The logarithm of the prior that makes the counts of a bin most likely, [G].

    EM: the prior of the next step is the mean of the cells' posteriors under the present one.
    """
    level = np.rint(np.log(sd) / _LEVEL)
    cell = np.floor(y / (np.exp(level * _LEVEL) * _WIDTH))
    low = cell.min()
    key = (level - level.min()) * (cell.max() - low + 1) + (cell - low)
    _, group, count = np.unique(key.astype(np.int64), return_inverse=True, return_counts=True)
    likelihood = _log_likelihood(np.bincount(group, y) / count, np.bincount(group, sd) / count, grid)
    likelihood = np.exp(likelihood - likelihood.max(1, keepdims=True))
    prior = np.full(len(grid), 1 / len(grid))
    for _ in range(_STEPS):
        weight = count / np.maximum(likelihood @ prior, np.finfo(float).tiny)
        prior *= weight @ likelihood
        prior /= prior.sum()
    return np.log(np.maximum(prior, np.finfo(float).tiny))


def _expectations(
    y: np.ndarray, sd: np.ndarray, grid: np.ndarray, log_prior: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Posterior means of the functions with these `values` [F, G] on the grid, [F, n]; n at a time is bounded."""
    result = np.empty((len(values), len(y)))
    for start in range(0, len(y), _CELLS_AT_ONCE):
        part = slice(start, start + _CELLS_AT_ONCE)
        posterior = _log_likelihood(y[part], sd[part], grid) + log_prior
        posterior = np.exp(posterior - posterior.max(1, keepdims=True))
        result[:, part] = values @ posterior.T / posterior.sum(1)
    return result

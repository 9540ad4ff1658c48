"""Each cell of a noisy symmetric matrix, predicted by a low-rank fit that did not see it."""

import numpy as np

_STEPS = 14


def held_out_low_rank(E: np.ndarray, h: np.ndarray, rank: int, ridge: float, folds: int) -> np.ndarray:
    """L [P, P]: every off-diagonal cell of E [P, P] as a rank-`rank` product fitted to other cells has it; diagonal 0.

    Cells are dealt to `folds` at random, (i, j) with (j, i), since E is symmetric. For each fold, with its cells and the
    diagonal missing,

        min |E - A B'|^2 over the other cells  +  sum_i ridge (h_i / mean h)^-2 (|a_i|^2 + |b_i|^2)

    is solved by alternating least squares; missing cells are filled in from the fit so far (EM). Rare items have the
    stronger ridge. The deal and the start are random but fixed: they have nothing to do with the data.
    """
    P = len(E)
    random = np.random.Generator(np.random.PCG64(0))
    fold = np.triu(random.integers(0, folds, (P, P)), 1)
    fold += fold.T
    relative = np.maximum(h / h.mean(), 1e-3)
    penalty = ridge * relative[:, None] ** -2
    start = random.standard_normal((P, min(rank, P))) * relative[:, None]
    result = np.zeros_like(E)
    for f in range(folds):
        missing = fold == f
        np.fill_diagonal(missing, True)
        X = np.where(missing, 0.0, E)
        B = np.linalg.qr(X @ (X @ start))[0] * np.sqrt(10.0)
        for _ in range(_STEPS):
            A = _solve(X, B, penalty)
            B = _solve(X.T, A, penalty)
            L = A @ B.T
            X = np.where(missing, L, E)
        result = np.where(missing, L, result)
    np.fill_diagonal(result, 0.0)
    return result


def _solve(X: np.ndarray, B: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """The rows a_i = (B'B + penalty_i I)^-1 B' x_i, for all i by one eigendecomposition of B'B."""
    values, Q = np.linalg.eigh(B.T @ B)
    return ((X @ (B @ Q)) / (values + penalty)) @ Q.T

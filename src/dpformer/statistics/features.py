"""The scores that public features of items predict (`data.features`). Post-processing of released values: it costs no privacy.

With x_j the features of item j, centred over the head, y_i = [1, x_i], and M the score matrix with rows centred, two ridge
regressions, one over the columns of M and one over its rows, give the score that features predict for a pair of items:

    f_ij = y_i' W x_j,     W = (Y'Y + r)^-1 Y' M X (X'X + r)^-1.

One cell of M is noisy; f averages over all cells of items with the same features. So pairs within the head score
(1 + w) f + K (M - f): K is near 1 where the cell's count stands out from its noise, and near 0 in cells of items without events.
M is unknown for other pairs, where its prediction is f: they score (1 + w) f. Hence an item outside the head, or a new one, is on
the same scale as the others. w is chosen on released values (`score_matrix`).
"""

import numpy as np

RIDGE, RANK = 10.0, 32


class Predicted:
    """The scores f of all pairs of items, `sources @ targets.T`: [items + 1, rank] both; row 0 is 0.

    encoded: [items + 1, values]. head: [P]. M: [P, P], its rows centred. scores: f within the head, [P, P].
    """

    def __init__(self, encoded: np.ndarray, head: np.ndarray, M: np.ndarray) -> None:
        own = encoded[head].astype(float)
        mean = own.mean(0)
        # An item without any value is an average one.
        described = encoded.max(1, keepdims=True) > 0
        x = np.where(described[head], own - mean, 0.0)
        y = np.concatenate([np.ones((len(x), 1)), x], 1)
        W = _ridge(x, _ridge(y, M, free=1).T).T
        U, size, V = np.linalg.svd(W, full_matrices=False)
        left, right = (U * size)[:, :RANK], V[:RANK].T
        # Not x itself, which would have many columns for all items.
        self.sources = left[0] + described * (encoded @ left[1:] - mean @ left[1:])
        self.targets = described * (encoded @ right - mean @ right)
        self.sources[0] = 0.0
        self.scores = self.sources[head] @ self.targets[head].T


def _ridge(x: np.ndarray, values: np.ndarray, free: int = 0) -> np.ndarray:
    """(X'X + r)^-1 X' values, with r = 0 for the first `free` columns of X."""
    penalty = np.full(x.shape[1], RIDGE)
    penalty[:free] = 0.0
    return np.linalg.solve(x.T @ x + np.diag(penalty), x.T @ values)

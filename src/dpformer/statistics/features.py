"""Public features of items, and the scores that they predict. Post-processing of released values: it costs no privacy.

With x_j the features of item j, centred over the head, y_i = [1, x_i], and M the score matrix with rows centred, two ridge
regressions, one over the columns of M and one over its rows, give the score that features predict for a pair of items:

    f_ij = y_i' W x_j,     W = (Y'Y + r)^-1 Y' M X (X'X + r)^-1.

One cell of M is noisy; f averages over all cells of items with the same features. So pairs within the head score M + w f. M is
unknown for other pairs, where its prediction is f: they score (1 + w) f. Hence an item outside the head, or a new one, is on the
same scale as the head. w is chosen on released values (`score_matrix`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpformer.errors import DataError

# A value that fewer items have is not used; of the others those that most items have.
LEAST, MOST = 5, 128
RIDGE, RANK = 10.0, 32


def encode(columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Which item has which value, 0 or 1, float32 [items + 1, values]; row 0 is 0.

    columns: name to the values of all items. Each value is a class; a text is split at "|", and a list has several values. For
    a name such as "price:10" numbers are put into 10 bins with equally many items each.

    >>> encode({"genre": ["Drama|War"] * 5 + ["Drama", None]})[[1, 6, 7]]
    array([[1., 1.],
           [1., 0.],
           [0., 0.]], dtype=float32)
    """
    owners: dict[tuple[str, str], list[int]] = {}
    for name, values in columns.items():
        column, _, bins = name.partition(":")
        texts = _binned(column, values, int(bins)) if bins else [_texts(value) for value in values]
        for item, text in enumerate(texts, 1):
            for one in dict.fromkeys(text):
                owners.setdefault((name, one), []).append(item)
        if max((len(items) for (of, _), items in owners.items() if of == name), default=0) < LEAST:
            raise DataError(
                f"--features {name}: no value of the column is shared by {LEAST} items, so it predicts nothing; leave it out, "
                f"or put numbers into bins: --features {column}:10"
            )
    # By number of items, and by first appearance: not by spelling, which a file may change.
    used = sorted((items for items in owners.values() if len(items) >= LEAST), key=len, reverse=True)[:MOST]
    encoded = np.zeros((len(next(iter(columns.values()))) + 1, len(used)), dtype=np.float32)
    for place, items in enumerate(used):
        encoded[items, place] = 1.0
    return encoded


def _texts(value: Any) -> list[str]:
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else str(value).split("|")
    return [] if value is None else [str(part).strip() for part in parts if str(part).strip()]


def _binned(column: str, values: Sequence[Any], bins: int) -> list[list[str]]:
    try:
        numbers = np.array([np.nan if value is None or value == "" else float(value) for value in values])
    except (TypeError, ValueError):
        raise DataError(f"--features {column}:{bins}: not all values are numbers; use {column} without bins") from None
    known = np.isfinite(numbers)
    edges = np.unique(np.quantile(numbers[known], np.arange(1, bins) / bins)) if known.any() else np.empty(0)
    return [[str(place)] if ok else [] for place, ok in zip(np.digitize(numbers, edges), known, strict=True)]


class Predicted:
    """The scores f of all pairs of items, `sources @ targets.T`: [items + 1, rank] both; row 0 is 0.

    encoded: [items + 1, values]. head: [P]. M: [P, P], its rows centred. scores: f within the head, [P, P].
    """

    def __init__(self, encoded: np.ndarray, head: np.ndarray, M: np.ndarray) -> None:
        own = encoded[head].astype(float)
        mean = own.mean(0)
        # An item without any value is an average one.
        known = encoded.max(1, keepdims=True) > 0
        x = np.where(known[head], own - mean, 0.0)
        y = np.concatenate([np.ones((len(x), 1)), x], 1)
        W = _ridge(x, _ridge(y, M, free=1).T).T
        U, size, V = np.linalg.svd(W, full_matrices=False)
        left, right = (U * size)[:, :RANK], V[:RANK].T
        # Not x itself, which would have many columns for all items.
        self.sources = left[0] + known * (encoded @ left[1:] - mean @ left[1:])
        self.targets = known * (encoded @ right - mean @ right)
        self.sources[0] = 0.0
        self.scores = self.sources[head] @ self.targets[head].T


def _ridge(x: np.ndarray, values: np.ndarray, free: int = 0) -> np.ndarray:
    """(X'X + r)^-1 X' values, with r = 0 for the first `free` columns of X."""
    penalty = np.full(x.shape[1], RIDGE)
    penalty[:free] = 0.0
    return np.linalg.solve(x.T @ x + np.diag(penalty), x.T @ values)

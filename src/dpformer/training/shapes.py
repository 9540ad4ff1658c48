"""The shapes of a micro-batch must not depend on who is in it.

A function that pads to the longest person of a micro-batch lets one person's leaving change the shape in which all others are
computed. Their rounding changes then, by more than the slack for float32 (see `groups`); and a model that reads padding (a
convolution, a mean over all positions) gives them other gradients altogether.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dpformer.errors import PrivacyError


class OneShape:
    """Refuses a batch whose tensors have other shapes than those of earlier batches, but for the dimension of people.

    That may be the first or the second, and in the first there may be a number of rows that people bring. Only tensors in
    lists, tuples and mappings are seen.
    """

    def __init__(self) -> None:
        self._rest: dict[
            str, tuple[tuple[int, ...] | None, ...]
        ] = {}  # without the first dimension, without the second

    def check(self, batch: Any) -> None:
        """Compare a batch with those before it."""
        for name, shape in _shapes(batch):
            now = shape[1:], shape[:1] + shape[2:]
            before = self._rest.get(name, now)
            same = tuple(a if a == b else None for a, b in zip(before, now, strict=True))
            if same == (None, None):
                raise PrivacyError(
                    f"tensor{name} of a batch has shape {shape}, and another length in other batches: when the longest person "
                    "leaves, the others are computed in another shape, which changes their gradients. Pad everybody to one "
                    "length in the data set or collate_fn: tokenizer(..., padding='max_length', truncation=True, max_length=128)"
                )
            self._rest[name] = same


def _shapes(batch: Any, name: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(batch, Tensor | np.ndarray):
        yield name, tuple(batch.shape)
    elif isinstance(batch, Mapping | list | tuple):
        for key, part in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
            yield from _shapes(part, f"{name}[{key!r}]")

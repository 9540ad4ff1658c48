"""Dropout masks by person."""

from __future__ import annotations

import math

import numpy as np
import torch

from dpformer.errors import PrivacyError
from dpformer.privacy.noise import kept_by_dropout


class PersonMasks:
    """Dropout masks of a micro-batch by a cipher: each person's is a function of step and person alone; see `models.dropout`."""

    def __init__(self, key: bytes, users: np.ndarray) -> None:
        self._key, self._users, self._calls = key, users, 0

    def __call__(self, shape: tuple[int, ...], rate: float) -> torch.Tensor:
        """The factors of the next call, [B, ...]."""
        if shape[0] != len(self._users):
            raise PrivacyError(
                f"dropout on {shape[0]} samples in a micro-batch of {len(self._users)} people; it is refused"
            )
        count = math.prod(shape[1:])
        kept = np.stack([kept_by_dropout(self._key, int(user), self._calls, count, rate) for user in self._users])
        self._calls += 1
        return torch.from_numpy(kept.reshape(shape)).float() / (1 - rate)

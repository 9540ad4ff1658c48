"""Where the generators of python, numpy and torch stand: code that must draw nothing is watched by them.

Generators of the caller's own cannot be seen.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> list[Any]:
    """The states of all generators that programs share."""
    started = torch.cuda.is_available() and torch.cuda.is_initialized()
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if started else ())]
    name, keys, *rest = np.random.get_state()
    return [random.getstate(), (name, *rest), torch.from_numpy(np.asarray(keys).astype(np.int64)), *of_torch]


def same_states(before: list[Any], now: list[Any]) -> bool:
    """Whether nothing was drawn between the two."""
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, now, strict=True))

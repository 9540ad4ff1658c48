"""The generators of python, numpy and torch: code that must draw nothing is watched, and a person's draws come from a seed.

Generators of the caller's own cannot be seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states() -> list[Any]:
    """The states of all generators that programs share."""
    started = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if started else ()
    return [random.getstate(), np.random.get_state(), torch.get_rng_state(), *devices]


def same_states(before: list[Any], now: list[Any]) -> bool:
    """Whether nothing was drawn between the two."""
    return all(_plain(a) == _plain(b) for a, b in zip(before, now, strict=True))


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor | np.ndarray):
        return state.tolist()
    return tuple(map(_plain, state)) if isinstance(state, tuple) else state


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from a seed, and as before afterwards."""
    of_python, of_numpy, of_torch, *_ = random_states()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)

"""The floating-point attack: which sums can a released number come from, and which not?

A released number is c + n, perhaps rounded to float32: c what all others add, and the target or not; n the noise. The attacker
knows c under both hypotheses. If no value that the noise can take leads from c to what was released, the hypothesis is refuted,
with certainty and by a single number. Noise that can be any step of a grid, with sums that are whole steps of the same grid,
refutes nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Lattice(Protocol):
    """All values that some noise can take."""

    def at_least(self, low: np.ndarray) -> np.ndarray:
        """The least value from `low` on."""
        ...


class Float32Noise:
    """std times a float32."""

    def __init__(self, std: float) -> None:
        self.std = std

    def at_least(self, low: np.ndarray) -> np.ndarray:
        """The least value from `low` on."""
        z = (low / self.std).astype(np.float32)
        return self.std * np.where(z.astype(np.float64) < low / self.std, next_float(z), z).astype(np.float64)

    def after(self, value: np.ndarray) -> np.ndarray:
        """The value that follows."""
        return self.std * next_float((value / self.std).astype(np.float32)).astype(np.float64)


class GridNoise:
    """Whole steps of a grid."""

    def __init__(self, grid: float) -> None:
        self.grid = grid

    def at_least(self, low: np.ndarray) -> np.ndarray:
        """The least value from `low` on."""
        return np.ceil(low / self.grid) * self.grid

    def after(self, value: np.ndarray) -> np.ndarray:
        """The value that follows."""
        return value + self.grid


def next_float(z: np.ndarray) -> np.ndarray:
    """The float32 after each."""
    return np.nextafter(z, np.float32(np.inf))


def possible(seen: np.ndarray, c: np.ndarray, noise: Lattice) -> np.ndarray:
    """Whether each number can be c plus a value of the noise, rounded to the type that it is seen in."""
    exact = seen.astype(np.float64)
    # Half a step of the type; in float64 the sums are known up to the order in which they were added.
    room = 0.51 * np.spacing(np.abs(seen)).astype(np.float64) if seen.dtype == np.float32 else 1e-12 * (1 + abs(exact))
    low = exact - room - c
    return noise.at_least(low) <= exact + room - c


def tell_apart(in_fits: np.ndarray, out_fits: np.ndarray) -> np.ndarray:
    """1: in, -1: out, 0: cannot tell, because both hypotheses are possible or neither is."""
    return in_fits.astype(np.int64) - out_fits.astype(np.int64)

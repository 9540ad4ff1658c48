"""One-shot releases of a run: each is charged to the ledger before its noise is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from dpformer.privacy import GaussianRelease, Ledger, NoiseSource, fingerprint


def charged(
    releases: Iterable[GaussianRelease], ledger: Ledger, noise: NoiseSource, about: str
) -> Callable[[tuple[int, ...], float], np.ndarray]:
    """`gaussian(shape, std)` for the releases in their order; `about` names the data and settings that they are made from."""
    left = iter(releases)

    def gaussian(shape: tuple[int, ...], std: float) -> np.ndarray:
        release = next(left)
        if not math.isclose(std, release.noise_multiplier, rel_tol=1e-9):
            raise AssertionError(
                f"{release.name} asks for noise {std:g}, and the plan has {release.noise_multiplier:g}"
            )
        state = noise.state()
        # With the noise: the ledger is published, and a bare hash of the data would confirm a guess of it.
        ledger.authorise_release(release.name, fingerprint(state), fingerprint(state, release.name, about))
        return noise.gaussian(shape, std)

    return gaussian

"""One-shot releases: how far one user moves each sum, and how much noise it gets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from dpformer.data import Sequences
from dpformer.models.statistics.release import Gaussian, Releaser
from dpformer.privacy import GaussianRelease, NoiseSource, noisy_histogram
from dpformer.privacy.frequencies import user_histogram
from dpformer.training.recipe import HISTOGRAM, STATISTICS, Recipe
from dpformer.trust.verify.checks import Found, Verification
from dpformer.trust.verify.steps import noise_found


def without(sequences: Sequences, user: int) -> tuple[np.ndarray, np.ndarray]:
    """Items and offsets when one user is taken away."""
    kept = [sequences[k] for k in range(len(sequences)) if k != user]
    return np.concatenate(kept), np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum([len(part) for part in kept])])


class Watched:
    """Has the face of a `Releaser` and asks the same of several: with noise, without it, and without each of some users.

    What goes back to the model is the answer with noise, so all are asked the same adaptive questions.
    """

    def __init__(self, sequences: Sequences, item_count: int, sigma: float, gaussian: Gaussian) -> None:
        def silent(shape: tuple[int, ...], std: float) -> np.ndarray:
            return np.zeros(shape)

        self.item_count = item_count
        self._noisy = Releaser(sequences.items, sequences.offsets, item_count, sigma, gaussian)
        self._exact = Releaser(sequences.items, sequences.offsets, item_count, sigma, silent)
        logs = [without(sequences, user) for user in range(len(sequences))]
        self._neighbours = [Releaser(items, offsets, item_count, sigma, silent) for items, offsets in logs]
        self.sensitivity: dict[str, float] = {}
        self.noise: dict[str, np.ndarray] = {}

    @property
    def releases(self) -> Any:
        """What was released."""
        return self._noisy.releases

    def std(self, share: float) -> float:
        """As a releaser's."""
        return self._noisy.std(share)

    def histogram(self, *arguments: Any, **options: Any) -> np.ndarray:
        """As a releaser's, watched."""
        return self._ask("histogram", *arguments, **options)

    def transitions(self, *arguments: Any, **options: Any) -> np.ndarray:
        """As a releaser's, watched."""
        return self._ask("transitions", *arguments, **options)

    def _ask(self, what: str, *arguments: Any, **options: Any) -> np.ndarray:
        answer = getattr(self._noisy, what)(*arguments, **options)
        name = self._noisy.releases[-1].name
        exact = getattr(self._exact, what)(*arguments, **options)
        moved = [np.linalg.norm(getattr(other, what)(*arguments, **options) - exact) for other in self._neighbours]
        self.sensitivity[name] = float(max(moved))
        noise = answer - exact
        self.noise[name] = noise[1:] if what == "histogram" else noise  # entry 0, padding, is no item
        return answer


def check_statistics(found: Verification, sequences: Sequences, items: int, recipe: Recipe, noise: NoiseSource) -> None:
    """The releases of a statistics model on a few sequences: sensitivity and noise of each."""
    model = STATISTICS[recipe.model]()
    plan = recipe.plan(len(sequences))
    first = plan.releases[0]
    sigma = first.noise_multiplier * math.sqrt(model.shares[first.name])
    watched = Watched(sequences, items, sigma, noise.gaussian)
    found.check("releases made", lambda: _made(model.fit_from(watched).releases, plan.releases))  # type: ignore[arg-type]
    found.check("contribution bound", lambda: _moved(watched.sensitivity, len(sequences)))

    def scale() -> Found:
        asked = {release.name: release.noise_multiplier for release in plan.releases}
        return noise_found([{n: torch.from_numpy(z / asked[n]) for n, z in watched.noise.items()}], 1.0)

    found.check("noise scale", scale)


def check_histogram(
    found: Verification, sequences: Sequences, items: int, release: GaussianRelease, noise: NoiseSource
) -> None:
    """The item histogram of a trained model's run."""

    def look() -> Found:
        exact = user_histogram(sequences.items, sequences.offsets, items)
        moved = [
            float(np.linalg.norm(user_histogram(*without(sequences, k), items) - exact)) for k in range(len(sequences))
        ]
        draws = []
        for _ in range(8):
            got = noisy_histogram(sequences.items, sequences.offsets, items, release, noise, len(sequences)).histogram
            assert got is not None
            draws.append({HISTOGRAM: torch.from_numpy((got - exact)[1:])})
        scale, bound = noise_found(draws, release.noise_multiplier), _moved({HISTOGRAM: max(moved)}, len(sequences))
        return Found(scale.good and bound.good, f"{bound.detail}; {scale.detail}", {**bound.figures, **scale.figures})

    found.check("histogram release", look)


def _made(made: Any, planned: tuple[GaussianRelease, ...]) -> Found:
    names, asked = [release.name for release in made], [release.name for release in planned]
    return Found(names == asked, f"made {names}" + ("" if names == asked else f", planned {asked}"), {"made": names})


def _moved(sensitivity: dict[str, float], users: int) -> Found:
    largest = max(sensitivity.values(), default=math.inf)
    shown = ", ".join(f"{name} {value:.6f}" for name, value in sensitivity.items())
    return Found(
        largest <= 1, f"taking away any of {users} users moves: {shown} (1 is the bound)", {"moved": sensitivity}
    )

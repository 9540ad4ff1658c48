"""The floating-point attack on the answers of DP-SGD. The folder has only weights, from which no single answer can be computed.

So the attacker is given far more than the folder: every answer of the run, who was drawn, and the exact sums with the target and
without. With float32 noise each answer then proves which of the two it is; with whole steps of a grid both are possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpformer import PhantomClipping
from dpformer.data import Sequences, demo_frame, prepare, save
from dpformer.errors import PrivacyError
from dpformer.fit.presets import make_recipe
from dpformer.privacy import Answer, Curator, Sample
from dpformer.privacy.plan import GRADIENTS
from dpformer.privacy.query import grid_step
from dpformer.training.groups import Groups
from dpformer.training.module_sum import ModuleSum
from tests.attacks.folders import emptied, release

USERS = 200


@dataclass(frozen=True)
class Seen:
    """One answer of a run, with the exact sums if the target is in, and if not; in grid steps."""

    answer: Answer
    sums: dict[str, dict[str, np.ndarray]]
    sensitivity: float

    def could_be(self, truth: str, values: Any) -> bool:
        """Can every number come from this hypothesis' sum and noise of this kind? values: nearest(noise) of that kind."""
        for name, noisy in self.answer.values.items():
            exact = self.sums[truth][name] * self.answer.grid
            nearest = values(noisy - exact)
            # Four units of the last place, for the rounding of the attacker's own arithmetic.
            room = 4 * np.spacing(np.maximum(np.abs(noisy), np.abs(exact)))
            if (np.abs(exact + nearest - noisy) > room).any():
                return False
        return True


class Watched(Curator[Sequences]):
    """The product, which shows the attacker everything; with `old`, the noise is float32 Gaussians times its deviation."""

    def __init__(self, seen: list[Seen], truth: str, old: np.random.Generator | None, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._seen, self._old = seen, old
        # The longest of all, who has something to add whenever drawn.
        self._both = {"in": self._people, "out": emptied(self._people, self._people.lengths.argmax(keepdims=True))}
        self._truth = truth
        self._people = self._both[truth]

    def ask(self, query: Any) -> Answer:
        planned = self.plan.planned(self.keys.place)
        drawn = self._draw(self.keys.sample(), len(self._people), planned.rate)
        sample = Sample(drawn, self.keys.dropout())
        grid = grid_step(query.bound, query.numbers)
        sums = {truth: dict(query.sum(people, sample, grid)) for truth, people in self._both.items()}
        answer = super().ask(query)
        assert answer.grid == grid
        if self._old is not None:
            values = {
                name: total * grid
                + answer.noise_std * self._old.standard_normal(total.shape, dtype=np.float32).astype(float)
                for name, total in sums[self._truth].items()
            }
            answer = Answer(answer.name, values, answer.noise_std, grid)
        self._seen.append(Seen(answer, sums, query.sensitivity(grid)))
        return answer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers") / "data"
    log = demo_frame()
    save(prepare(log.filter(log["user_id"] < f"reader-{USERS:04d}")), folder)
    return folder


def watch(folder: Path, data: Path, truth: str, old: np.random.Generator | None) -> list[Seen]:
    """The answers of a small run of the preset `pure` in which the target adds something."""
    recipe = make_recipe("pure", epsilon=8.0, seed=1, batch_size=100, epochs=4.0, d=8, max_length=10, vocabulary=100)
    seen: list[Seen] = []
    release(folder, data, recipe, partial(Watched, seen, truth, old))
    assert sum(one.answer.name == GRADIENTS for one in seen) == 8
    telling = [one for one in seen if any((one.sums["in"][k] != one.sums["out"][k]).any() for k in one.sums["in"])]
    assert len(telling) > 1, "the histogram, and a step into which the target was drawn"
    return telling


def float32_times(std: float, noise: np.ndarray) -> np.ndarray:
    return std * (noise / std).astype(np.float32).astype(float)


def steps_of(grid: float, noise: np.ndarray) -> np.ndarray:
    return np.rint(noise / grid) * grid


@pytest.mark.parametrize("truth", ["in", "out"])
def test_float32_noise_tells_in_every_answer(data: Path, tmp_path: Path, truth: str) -> None:
    for one in watch(tmp_path / "run", data, truth, np.random.Generator(np.random.SFC64(3))):
        possible = {
            guess for guess in ("in", "out") if one.could_be(guess, partial(float32_times, one.answer.noise_std))
        }
        assert possible == {truth}, f"{one.answer.name}: {possible}"


@pytest.mark.parametrize("truth", ["in", "out"])
def test_the_product_tells_in_none(data: Path, tmp_path: Path, truth: str) -> None:
    for one in watch(tmp_path / "run", data, truth, None):
        answer = one.answer
        for values in answer.values.values():
            steps = values / answer.grid  # a power of 2: nothing is rounded
            assert (steps == np.rint(steps)).all()
            assert np.abs(steps).max() < 2**53
        assert all(one.could_be(guess, partial(steps_of, answer.grid)) for guess in ("in", "out"))
        assert not any(one.could_be(guess, partial(float32_times, answer.noise_std)) for guess in ("in", "out"))
        moved = sum(float(((one.sums["in"][k] - one.sums["out"][k]).astype(float) ** 2).sum()) for k in one.sums["in"])
        assert moved**0.5 <= one.sensitivity


def test_a_module_with_dropout_of_torch_is_refused() -> None:
    """One person's leaving would change the masks of all others: the sum moved by 5 to 9 C in the module below."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    query, everybody = ModuleSum(module, PhantomClipping(module), Groups(20, 20), 20), Sample(np.arange(20), b"")
    with pytest.raises(PrivacyError, match="dropout"):
        query.start(everybody, 2.0**-26)
    module.eval()
    assert len(query.start(everybody, 2.0**-26)) == 1

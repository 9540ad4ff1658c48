"""A small model and people for the tests of the loop, and planted defects."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.privacy import Curator
from dpformer.training import PrivateTraining

PEOPLE, WIDTH = 60, 5


class Rows(torch.utils.data.Dataset[Any]):
    """People as (place, row); remembers in which batch it was read."""

    def __init__(self, people: int = PEOPLE, seed: int = 1) -> None:
        self.rows = torch.randn(people, WIDTH, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[int, Tensor]:
        return place, self.rows[place]


def small_model(seed: int = 0, double: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))
    return model.double() if double else model


def losses(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[1])[:, 0].square() * 30


def begin(run: Path, model: nn.Module | None = None, rate: float = 0.1, **options: Any) -> PrivateTraining:
    """A run of three steps over all people, whose accounting is quick, with SGD; options change it."""
    model = small_model() if model is None else model
    chosen: dict[str, Any] = {
        "epsilon": 8.0,
        "delta": 1e-3,
        "batch_size": PEOPLE,
        "steps": 3,
        "seed": 1,
        "micro_batch": 7,
    }
    chosen |= {"run": run, "max_norm": 0.5, **options}
    optimizer = chosen.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=rate)
    return PrivateTraining(model, optimizer, chosen.pop("dataset", Rows()), **chosen)


def train(private: PrivateTraining, most: int | None = None) -> list[list[int]]:
    """Make the steps (at most so many more), and return who was in each."""
    drawn: list[list[int]] = [[]]
    for batch in private:
        drawn[-1] += batch[0].tolist()
        if private.step(lambda batch=batch: losses(private.model, batch)):
            drawn.append([])
            if most is not None and len(drawn) > most:
                break
    return drawn[:-1]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def no_noise(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    """A planted defect: the answers are exact."""
    return np.zeros(shape, dtype=np.int64)


EXACT = partial(Curator, noise=no_noise)

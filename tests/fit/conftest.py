"""A small log of people with recognisable ids, prepared once."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpformer.data import prepare, save
from dpformer.fit.run import Run
from dpformer.fit.workers import Team, Worker

USERS, ITEMS = 60, 20
TITLES = {"i00": "Good, the Bad, the Ugly", "i01": "Toy,Story", "i02": "Heat"}


def small_log(users: int = USERS, items: int = ITEMS, seed: int = 0) -> pl.DataFrame:
    """People who walk around a circle of items; everybody's length differs, and user 0 has a single event."""
    random = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        here = int(random.integers(items))
        for time in range(1 if user == 0 else int(random.integers(2, 12))):
            item = f"i{here:02d}"
            rows.append((f"person-{user:04d}-x7Qz", item, time, TITLES.get(item, f"Title {here}")))
            here = (here + int(random.integers(1, 3))) % items
    return pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp", "title"], orient="row")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "data"
    save(prepare(small_log(), title="title"), folder)
    return folder


def plant_worker(run: Run, kind: type[Worker]) -> None:
    """Let a worker of another kind make the run's sums, alone; the stages before the steps are run."""
    trainer = run.begin_steps()
    trainer.query.team = Team(kind(trainer.model, trainer.worker.clipping), 1)

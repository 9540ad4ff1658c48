"""A folder is copied with the times of its files, and each answer is a file: a step takes longer with a long person in it.

With one person of 1,000 events among 300 of five, the times told the steps into which the person was drawn from the others with
an area under the curve of 0.95, whatever epsilon. Then it is not secret who was drawn, as Poisson sampling needs it to be.
"""

import os
from pathlib import Path

import torch
from torch import nn

from dpformer.artifact.write import complete
from dpformer.data import prepare, save
from dpformer.fit.run import start
from dpformer.training import PrivateTraining
from tests.fit.conftest import small_log
from tests.recipes import small_recipe


def times_of(folder: Path) -> set[int]:
    return {path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def test_all_files_of_a_finished_run_have_the_time_of_its_start(tmp_path: Path) -> None:
    save(prepare(small_log(users=30, items=12)), tmp_path / "data")
    run = start(tmp_path / "run", tmp_path / "data", small_recipe())
    began = (tmp_path / "run" / "config.json").stat().st_mtime_ns
    assert run.train()
    assert len(list((tmp_path / "run" / "answers").iterdir())) > 5
    (time,) = times_of(tmp_path / "run")
    assert time <= began


def test_a_run_whose_end_was_interrupted_too(tmp_path: Path) -> None:
    """The release is written and not yet in place."""
    release = tmp_path / "private" / "release"
    release.mkdir(parents=True)
    for path in (tmp_path / "config.json", tmp_path / "ledger.jsonl", release / "model.safetensors"):
        path.write_text("x")
    os.utime(tmp_path / "config.json", ns=(1, 10**18))
    complete(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert times_of(tmp_path) == {10**18}


def test_a_loop_of_ones_own_too(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    data = [(torch.randn(3), torch.randn(1)) for _ in range(30)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = PrivateTraining(
        model, optimizer, data, epsilon=8.0, delta=1e-3, batch_size=10, steps=3, run=tmp_path / "run"
    )
    for x, y in private:
        private.step(lambda x=x, y=y: (model(x) - y).square()[:, 0])
    assert len(times_of(tmp_path / "run")) == 1

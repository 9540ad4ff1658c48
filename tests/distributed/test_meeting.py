"""Processes find those of the same start, whatever earlier starts left in torchrun's store; and what a restart may take over."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dpformer.errors import DPFormerError
from dpformer.files import write_json
from dpformer.fit.lead_and_follow import finished
from dpformer.fit.run import resume, start
from dpformer.privacy import read_ledger
from dpformer.training.ranks import Ranks
from dpformer.training.restart import Job, meet, open_store
from tests.fit.conftest import data  # noqa: F401
from tests.recipes import small_recipe

Open = Callable[..., Any]
RECIPES = {"network": small_recipe(histogram=False, batch_size=60), "popularity": small_recipe("popularity")}


@pytest.fixture
def at_the_store() -> Open:
    """A store as torchrun has it, and a way for a process to reach it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def reach(run: str = "x") -> Any:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": run}
        return open_store(place, 20.0)

    return reach


class Process(threading.Thread):
    """One rank of a start: which name does it find?"""

    def __init__(self, store: Any, rank: int, size: int, seconds: float = 20.0) -> None:
        super().__init__(daemon=True)
        self.store, self.place, self.name_found, self.error = store, (rank, size, seconds), "", ""
        self.start()

    def run(self) -> None:
        try:
            meet(self.store, *self.place).set("here", "")
            self.name_found = self.store.get("lead").decode()
        except RuntimeError as error:
            self.error = str(error)


def found(*processes: Process) -> list[str]:
    for process in processes:
        process.join(30)
    assert [process.error for process in processes] == [""] * len(processes)
    return [process.name_found for process in processes]


def test_everybody_finds_the_others_of_the_same_start(at_the_store):
    """Ranks 1 and 2 come before rank 0, and read what rank 0 of the start before has left."""
    names = set()
    for number in range(3):
        others = [Process(at_the_store(), rank, 3) for rank in (1, 2)]
        time.sleep(0.1)
        assert all(process.is_alive() for process in others), "met somebody of an earlier start"
        name, *same = found(Process(at_the_store(), 0, 3), *others)
        assert same == [name, name]
        names.add(name)
        assert len(names) == number + 1


def test_a_start_that_came_to_nothing(at_the_store):
    """Rank 0 and one other were there, the third never; all are started again, as two."""
    half = [Process(at_the_store(), rank, 3, seconds=0.3) for rank in (0, 1)]
    for process in half:
        process.join(20)
    assert [process.error for process in half] == ["timed out: no word of rank 2", "timed out: no word of rank 0"]
    name, same = found(Process(at_the_store(), 1, 2), Process(at_the_store(), 0, 2))
    assert name == same


def test_two_torchruns_at_one_address_are_two_jobs(at_the_store, tmp_path):
    x, y = ([Job.of(at_the_store(run), rank) for rank in (0, 0, 1, 0)] for run in "xy")
    assert len({job.name for job in x}) == len({job.name for job in y}) == 1
    assert x[0].name != y[0].name
    assert [job.restarts for job in x] == [job.restarts for job in y] == [0, 1, 0, 2]
    write_json(tmp_path / "local.json", {})
    x[0].take(tmp_path)
    with pytest.raises(DPFormerError, match=f"that is {tmp_path} on machine"):
        x[1].refuse_second(tmp_path / "other")
    y[1].refuse_second(tmp_path / "other")


def test_a_restart_on_another_machine_does_not_pay_again(at_the_store, data, tmp_path):  # noqa: F811
    """Rank 0 has another disk after the restart: it does not see the run that was begun, and must not begin it anew."""
    first = start(tmp_path / "here", data, small_recipe(), Ranks(job=Job.of(at_the_store(), 0)))
    first.begin_steps().make_step(first.curator)
    first.close()
    again = Ranks(job=Job.of(at_the_store(), 0))
    with pytest.raises(DPFormerError, match=r"is not the run that torchrun began .* that is .*/here on machine"):
        start(tmp_path / "there", data, small_recipe(), again)
    with pytest.raises(DPFormerError, match="is not the run that torchrun began"):
        start(tmp_path / "there", data, small_recipe("popularity"), again)
    assert not (tmp_path / "there").exists()
    assert start(tmp_path / "here", data, small_recipe(), again).train()


def test_a_restart_before_anything_was_begun_begins(at_the_store, data, tmp_path):  # noqa: F811
    ranks = Ranks(job=[Job.of(at_the_store(), 0) for _ in range(3)][-1])
    assert ranks.job.restarts == 2
    assert not finished(tmp_path / "run", ranks)
    assert start(tmp_path / "run", data, small_recipe("popularity"), ranks).train()


@pytest.mark.parametrize("kind", RECIPES)
def test_only_the_job_that_released_is_told_that_all_is_done(kind, data, tmp_path):  # noqa: F811
    folder, recipe = tmp_path / "run", RECIPES[kind]
    assert start(folder, data, recipe, Ranks(job=Job("a"))).train()
    (folder / "private").mkdir()  # a crash between the release and this
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for job in (Job(), Job("a"), Job("b", 1), Job(None, 1)):
        assert not finished(folder, Ranks(job=job), resuming=False)
        with pytest.raises(DPFormerError, match="exists already"):
            start(folder, data, recipe, Ranks(job=job))
    with pytest.raises(DPFormerError, match="is finished"):
        resume(folder, ranks=Ranks(job=Job("b")))
    (folder / "private").mkdir(exist_ok=True)
    assert finished(folder, Ranks(job=Job("a", 1)), resuming=False)
    assert not (folder / "private").exists()
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_run_belongs_to_the_job_that_went_on_with_it(kind, data, tmp_path):  # noqa: F811
    folder, recipe = tmp_path / "run", RECIPES[kind]
    start(folder, data, recipe, Ranks(job=Job("a"))).close()
    assert resume(folder, ranks=Ranks(job=Job("b"))).train()
    assert not finished(folder, Ranks(job=Job("a", 1)))
    assert finished(folder, Ranks(job=Job("b", 1)))
    assert set(json.loads((folder / "local.json").read_text())) == {"data", "job"}
    assert (folder / "local.json").stat().st_mode & 0o777 == 0o600
    assert read_ledger(folder).steps_charged == read_ledger(folder).plan.steps

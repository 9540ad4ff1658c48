"""Several real processes on this machine, by gloo: forked, so that each costs a moment and not seconds of imports."""

import faulthandler
import json
import os
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dpformer.artifact import write as write_module
from dpformer.data import load
from dpformer.errors import DPFormerError
from dpformer.fit import folder as folder_module
from dpformer.fit import lead_and_follow
from dpformer.fit import run as run_module
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import resume, start
from dpformer.training.ranks import Ranks, join
from tests.fit.conftest import data  # noqa: F401

Work = Callable[[Ranks], Any]
SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code (minus the signal, if one killed it), what it returned, and its error."""

    code: int
    value: Any
    error: str


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def fork_ranks(
    folder: Path, size: int, work: Work, seconds: float = SECONDS, meanwhile: Callable[[list[int]], None] | None = None
) -> list[Ended]:
    """`work(ranks)` in `size` new processes. What it returns must be ready for JSON. `meanwhile` gets their process ids."""
    folder.mkdir(parents=True, exist_ok=True)
    port, children = free_port(), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _be(rank, size, port, folder, work, seconds)
        children.append(child)
    try:
        if meanwhile is not None:
            meanwhile(children)
        codes = [_wait(child) for child in children]
    finally:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
    found = []
    for rank, code in enumerate(codes):
        path = folder / f"rank-{rank}.json"
        said = json.loads(path.read_text()) if path.exists() else {"value": None, "error": ""}
        path.unlink(missing_ok=True)
        found.append(Ended(code, said["value"], said["error"]))
    return found


def _wait(child: int, limit: float = 200.0) -> int:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1000


def _be(rank: int, size: int, port: int, folder: Path, work: Work, seconds: float) -> None:
    said, code = {"value": None, "error": ""}, 1
    try:
        faulthandler.dump_traceback_later(seconds, file=open(folder / f"hangs-{rank}.txt", "w"))  # noqa: SIM115
        torch.set_num_threads(1)
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(place, GLOO_SOCKET_IFNAME="lo")
        with join(seconds, place) as ranks:
            said["value"], code = work(ranks), 0
    except DPFormerError as error:
        said["error"] = f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001
        said["error"] = traceback.format_exc()
    finally:
        (folder / f"rank-{rank}.json").write_text(json.dumps(said))
        os._exit(code)


@pytest.fixture
def loaded(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """The prepared data, read before any process is forked: polars does not survive a fork."""
    dataset = load(data)
    packed, hashes = write_module.pack_catalogue(dataset.catalogue), write_module.column_hashes(dataset.catalogue)
    monkeypatch.setattr(write_module, "pack_catalogue", lambda catalogue: packed)
    monkeypatch.setattr(write_module, "column_hashes", lambda catalogue: hashes)
    for module in (folder_module, run_module, lead_and_follow):
        monkeypatch.setattr(module, "load", lambda folder: dataset)
    return data


def begun(folder: Path, data: Path, recipe: Recipe) -> Path:  # noqa: F811
    """A run that is ready for its first step: the stages before the steps are done, and saved."""
    run = start(folder, data, recipe)
    run.begin_steps()
    run.save()
    run.close()
    return folder


def copied(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(name)))


def train_on(folder: Path, **options: Any) -> Work:
    """Go on with a run, all ranks together."""

    def work(ranks: Ranks) -> Any:
        if not ranks.first:
            follower = lead_and_follow.follow(ranks)
            assert follower is not None
            return follower.train()
        run = resume(folder, ranks=ranks)
        try:
            return run.train(**options)
        finally:
            run.close()

    return work

"""Processes that torchrun starts again are refused; a program may meet again and again."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dpformer.errors import RankError
from dpformer.training.ranks import join


@pytest.fixture
def store() -> Any:
    """As torchrun has it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def meet(port: int, run: str = "x", size: int = 1, rank: int = 0) -> str:
    """Join as a process of a torchrun. Returns the error."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": run}
    place |= {"RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        with join(20.0, place) as ranks:
            assert ranks.gather(rank) == ([*range(size)] if rank == 0 else [])
    except RankError as error:
        return str(error)
    return ""


def twice(port: int, rank: int, errors: Any) -> None:
    errors.put([meet(port, size=2, rank=rank) for _ in range(2)])


def started(port: int, *ranks: int) -> list[list[str]]:
    """What new processes say."""
    several = multiprocessing.get_context("fork")
    errors = several.Queue()
    processes = [several.Process(target=twice, args=(port, rank, errors)) for rank in ranks]
    for process in processes:
        process.start()
    said = [errors.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    return said


def test_a_program_meets_twice_and_its_restart_is_refused(store):
    assert started(store.port, 0, 1) == [["", ""], ["", ""]]
    for rank in (1, 0):
        ((error, again),) = started(store.port, rank)
        assert f"torchrun has started rank {rank} again" in error
        assert "dpformer resume RUN" in error
        assert error == again


def test_one_process_and_two_torchruns_at_one_address(store):
    assert [meet(store.port, run) for run in ("x", "y", "x")] == ["", "", ""]
    ((error, _),) = started(store.port, 0)
    assert "torchrun has started rank 0 again" in error


def test_a_store_that_cannot_be_reached(store, monkeypatch):
    monkeypatch.setattr(dist, "TCPStore", unreachable)
    assert "torchrun's store cannot be reached (no route); start it again" in meet(store.port)


def unreachable(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("no route")

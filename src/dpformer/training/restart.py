"""What outlives the processes that torchrun starts again: its store, and the run folder.

torchrun's store still has all that earlier processes wrote. How often torchrun has restarted cannot tell their entries apart:
every machine counts for itself, and one that starts again because another one failed does not count that. So rank 0 gives each
start a new name, and goes on when all processes have answered to it (`meet`):

    rank 0          lead = a                                   a/1, a/2, ... are there: a/all = b1,b2,...
    rank r                      sees lead = a: a/r = b_r                              b_r is in a/all: so this is the start

a and all b_r are random and new in every process. A process that reads the name of an earlier start answers to it in vain, sees
others in its list, and looks again.

A `Job` is one torchrun with all its restarts. The run folder has the job that had it last, in `local.json`, which is not
released; and the store has the folder. So after a restart

    the folder is the job's, and has no model      the run goes on
    the folder is the job's, and has its model     a process ended after the release: all is done
    the folder is not the job's, which began one   rank 0 is another machine now: it must not begin, and pay, again
    neither                                        no process came as far as a folder: the run begins
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from platform import node
from typing import Any

import torch.distributed as dist

from dpformer.artifact.layout import LOCAL, MODEL
from dpformer.errors import DPFormerError, RankError
from dpformer.files import read_json, write_json

_LEAD, _JOB, _STARTS, _RUN = "lead", "job", "starts", "run"
PAUSE = 0.02


@dataclass(frozen=True)
class Job:
    """One torchrun with all its restarts. name: the same in all of them, and different in any other; None without torchrun.

    restarts: how often torchrun has restarted rank 0; rank 0 knows. store: torchrun's.
    """

    name: str | None = None
    restarts: int = 0
    store: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, store: Any, rank: int) -> Job:
        """The job of a store. Rank 0 calls it once in each start."""
        with _reachable():
            # Sets the name if no process has, and gives what is there.
            name = store.compare_set(_JOB, "", secrets.token_hex(16)).decode()
            return cls(name, store.add(_STARTS, 1) - 1 if rank == 0 else 0, store)

    def began(self, folder: Path) -> bool:
        """After a restart: is the run in this folder the one that this job began?"""
        path = folder / LOCAL
        known = self.name is not None and self.restarts > 0 and path.is_file()
        return known and bool(read_json(path).get("job") == self.name)

    def ended(self, folder: Path) -> bool:
        """After a restart: has this job released its model already?"""
        return self.began(folder) and (folder / MODEL).exists()

    def take(self, folder: Path) -> None:
        """The run in this folder is this job's from now on. Rank 0 calls it before anything is spent."""
        if self.name is not None:
            write_json(folder / LOCAL, {**read_json(folder / LOCAL), "job": self.name}, mode=0o600)
        self.note(folder)

    def note(self, folder: Path) -> None:
        """This job has begun, or goes on with, the run in this folder; see `refuse_second`."""
        if self.store is not None:
            with _reachable():
                self.store.set(_RUN, f"{folder.resolve()} on machine {node()}")

    def refuse_second(self, folder: Path) -> None:
        """After a restart: a job that has begun a run does not begin another where it does not see the first."""
        if self.store is None or not self.restarts:
            return
        with _reachable():
            place = self.store.get(_RUN).decode() if self.store.check([_RUN]) else None
        if place is not None:
            raise DPFormerError(
                f"{folder}: is not the run that torchrun began before it restarted its processes; that is {place}, where rank 0 "
                "was, and some of its budget is spent. Go on with rank 0 on that machine (torchrun ... -m dpformer resume), or "
                "keep run folders on a disk that all machines share"
            )


NO_JOB = Job()


def open_store(environment: Mapping[str, str], seconds: float) -> Any:
    """torchrun's store. Several torchruns may meet at one address, each under an id."""
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    with _reachable():
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"dpformer/{environment.get('TORCHELASTIC_RUN_ID', '')}", store)  # type: ignore[attr-defined]


def meet(store: Any, rank: int, size: int, seconds: float) -> Any:
    """A store for this start alone, when all `size` processes are here."""
    own, end = secrets.token_hex(8), time.monotonic() + seconds
    name = _lead(store, own, size, end) if rank == 0 else _answer(store, own, rank, end)
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _lead(store: Any, own: str, size: int, end: float) -> str:
    store.set(_LEAD, own)
    missing = [*range(1, size)]
    while missing := [rank for rank in missing if not store.check([f"{own}/{rank}"])]:
        _wait(end, f"no word of rank {', '.join(map(str, missing))}")
    store.set(f"{own}/all", ",".join(store.get(f"{own}/{rank}").decode() for rank in range(1, size)))
    return own


def _answer(store: Any, own: str, rank: int, end: float) -> str:
    answered = None
    while True:
        lead = store.get(_LEAD).decode() if store.check([_LEAD]) else None
        if lead not in (None, answered):
            store.set(f"{lead}/{rank}", own)
            answered = lead
        if lead and store.check([f"{lead}/all"]) and own in store.get(f"{lead}/all").decode().split(","):
            return str(lead)
        _wait(end, "no word of rank 0")


def _wait(end: float, why: str) -> None:
    if time.monotonic() > end:
        raise RuntimeError(f"timed out: {why}")
    time.sleep(PAUSE)


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise RankError(f"torchrun's store cannot be reached ({reason}); start it again") from None

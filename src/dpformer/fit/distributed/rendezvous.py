"""How processes that torchrun started, perhaps not for the first time, find those of the same start.

torchrun's store outlives the processes: after a restart it still has all that those before them wrote. How often torchrun has
restarted cannot tell the two apart: every machine counts for itself, and one that starts again because another one failed does
not count that. So rank 0 gives each start a name that nobody had, and goes on when all processes have answered to it:

    rank 0          lead = a                                   a/1, a/2, ... are there: a/all = b1,b2,...
    rank r                      sees lead = a: a/r = b_r                                       b_r is in a/all: so this is it

a and all b_r are random and new in every process. A process that reads the name of an earlier start answers to it in vain, finds
others in its list, and looks again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from platform import node
from typing import Any

import torch.distributed as dist

_LEAD, _JOB, _STARTS, _RUN = "lead", "job", "starts", "run"
PAUSE = 0.02


class Meeting:
    """The store of one torchrun, with names of its own in it."""

    def __init__(self, environment: Mapping[str, str], seconds: float) -> None:
        self.seconds = seconds
        store = dist.TCPStore(  # type: ignore[attr-defined]
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=seconds),
        )
        # Several torchruns may meet at one address, each under an id.
        self._store = dist.PrefixStore(f"dpformer/{environment.get('TORCHELASTIC_RUN_ID', '')}", store)  # type: ignore[attr-defined]

    @property
    def job(self) -> str:
        """The same text in all starts of one torchrun, and different in any other."""
        # Sets it if nobody has, and gives what is there.
        return str(self._store.compare_set(_JOB, "", secrets.token_hex(16)).decode())

    def count(self) -> int:
        """On rank 0, once in a process: how many processes had this part before it."""
        return int(self._store.add(_STARTS, 1)) - 1

    def store(self, rank: int, size: int) -> Any:
        """A store for this start alone, when all `size` processes are here."""
        own, end = secrets.token_hex(8), time.monotonic() + self.seconds
        name = self._lead(own, size, end) if rank == 0 else self._follow(own, rank, end)
        return dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]

    def note_run(self, folder: Path) -> None:
        """Note for later starts where the run is."""
        self._store.set(_RUN, f"{folder.resolve()} on machine {node()}")

    def noted_run(self) -> str | None:
        """What was noted, in this start or before."""
        return str(self._store.get(_RUN).decode()) if self._store.check([_RUN]) else None

    def _lead(self, own: str, size: int, end: float) -> str:
        self._store.set(_LEAD, own)
        missing = [*range(1, size)]
        while missing := [rank for rank in missing if not self._store.check([f"{own}/{rank}"])]:
            _wait(end, f"no word of rank {', '.join(map(str, missing))}")
        self._store.set(f"{own}/all", ",".join(self._store.get(f"{own}/{rank}").decode() for rank in range(1, size)))
        return own

    def _follow(self, own: str, rank: int, end: float) -> str:
        answered = None
        while True:
            lead = self._store.get(_LEAD).decode() if self._store.check([_LEAD]) else None
            if lead not in (None, answered):
                self._store.set(f"{lead}/{rank}", own)
                answered = lead
            if (
                lead
                and self._store.check([f"{lead}/all"])
                and own in self._store.get(f"{lead}/all").decode().split(",")
            ):
                return str(lead)
            _wait(end, "no word of rank 0")


def _wait(end: float, why: str) -> None:
    if time.monotonic() > end:
        raise RuntimeError(f"timed out: {why}")
    time.sleep(PAUSE)

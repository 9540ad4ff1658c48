"""Who am I among the processes of a training, and the few things that they say to one another.

A training is one process, or several that torchrun starts, perhaps on several machines. They are numbered: rank 0 leads. It alone
draws users and noise, writes the ledger and the run folder, and prints; the others get their part of every batch from it.

    sum_to_first_, share_     tensors, in one flattened message: reduce to rank 0, broadcast from rank 0
    broadcast, gather, deal   JSON from rank 0 to all; JSON from all to rank 0; an array from rank 0 to each its own

Tensors travel by gloo, or by NCCL where every process has a GPU. All else is point to point between rank 0 and one other, by
gloo on the CPU: so that a process that has ended or hangs can be named. Rank 0 waits for nobody longer than `seconds`, and the
others for rank 0 at most twice as long; a process that has ended is noticed at once. After an error the processes are no longer
in step: a process that gets a `RankError` must end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpformer.errors import RankError
from dpformer.fit.distributed.failures import fate, of_all, short
from dpformer.fit.distributed.rendezvous import Meeting

# torch's own limit; loading data and the first releases of rank 0 must fit in.
SECONDS = 1800.0
_STOPPED = -1
_CPU = torch.device("cpu")


class LeaderError(RankError):
    """Rank 0 cannot go on, and says why itself."""


@dataclass(frozen=True)
class Ranks:
    """This process among `size`. Alone (the default), every exchange is trivial and torch.distributed is not touched.

    tensors, words: the process groups for tensors and for all else. job: the same text in all restarts of one torchrun, and
    different in any other; None without torchrun. restarts: how often torchrun has restarted rank 0; rank 0 knows. meeting: what
    outlives a restart.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU
    seconds: float = SECONDS
    tensors: dist.ProcessGroup | None = None
    words: dist.ProcessGroup | None = None
    job: str | None = None
    restarts: int = 0
    meeting: Meeting | None = field(default=None, repr=False, compare=False)

    @property
    def first(self) -> bool:
        """Is this the process that leads?"""
        return self.rank == 0

    @property
    def others(self) -> range:
        """The ranks that follow."""
        return range(1, self.size)

    def sum_to_first_(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all ranks into rank 0's tensors; what the others' hold after it is of no use: one reduce."""
        if self.size > 1:
            with self._collective(), _flat(tensors) as flat:
                dist.reduce(flat, dst=0, group=self.tensors)

    def share_(self, tensors: Sequence[Tensor]) -> None:
        """Put rank 0's tensors into those of all ranks, bit for bit: one broadcast."""
        if self.size > 1:
            with self._collective(), _flat(tensors) as flat:
                dist.broadcast(flat, src=0, group=self.tensors)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's JSON-ready value, on all ranks; the others' is not looked at."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode() if self.first else b""))

    def broadcast_bytes(self, value: bytes = b"") -> bytes:
        """Rank 0's bytes, on all ranks."""
        if self.first:
            for rank in self.others:
                self._send(value, rank)
            return value
        return self._receive(0)

    def gather(self, value: Any = None) -> list[Any]:
        """The JSON-ready values of all ranks, on rank 0; an empty list on the others. A rank that does not answer is named."""
        if self.first:
            return [value, *(json.loads(self._receive(rank)) for rank in self.others)]
        self._send(json.dumps(value).encode(), 0)
        return []

    def deal(self, parts: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Each rank's own of rank 0's int64 arrays, one for each rank."""
        if self.first:
            for rank in self.others:
                self._send(parts[rank].astype("<i8").tobytes(), rank)
            return parts[0]
        return np.frombuffer(self._receive(0), dtype="<i8").astype(np.int64)

    def barrier(self) -> None:
        """Wait until all are here."""
        self.gather()
        self.broadcast()

    def agree(self, wish: bool) -> bool:
        """Does anybody wish it? The same answer on all ranks."""
        wishes = self.gather(wish)
        return bool(self.broadcast(any(wishes)))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """What rank 0 does while the others wait in `broadcast`: if it fails, they end, and leave the word to rank 0."""
        try:
            yield
        except BaseException as error:
            if self.first and not isinstance(error, RankError):
                for rank in self.others:
                    with suppress(RankError):  # it may have ended by itself
                        self._send(None, rank)
            raise

    def note_run(self, folder: Path) -> None:
        """Note for restarts where the run is. Rank 0 does, before anything is spent."""
        if self.meeting is not None:
            with _stored():
                self.meeting.note_run(folder)

    def noted_run(self) -> str | None:
        """What was noted, by these processes or by those before a restart."""
        if self.meeting is None:
            return None
        with _stored():
            return self.meeting.noted_run()

    def _send(self, value: bytes | None, rank: int) -> None:
        """None says: rank 0 cannot go on."""
        with self._with(rank):
            dist.send(torch.tensor([_STOPPED if value is None else len(value)]), dst=rank, group=self.words)
            if value:
                dist.send(torch.frombuffer(bytearray(value), dtype=torch.uint8), dst=rank, group=self.words)

    def _receive(self, rank: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        with self._with(rank):
            dist.recv(size, src=rank, group=self.words)
            if int(size) == _STOPPED:
                raise LeaderError("rank 0 cannot go on; it says why")
            value = torch.zeros(int(size), dtype=torch.uint8)
            if len(value):
                dist.recv(value, src=rank, group=self.words)
        return value.numpy().tobytes()

    @contextmanager
    def _with(self, rank: int) -> Iterator[None]:
        """An exchange with one other rank, whose failure is its."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {self.rank} waited for rank {rank} of {self.size}, which {fate(error, self.seconds)}"
            ) from None

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """An exchange of all."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise RankError(of_all(error, self.rank, self.size, self.seconds)) from None


SINGLE = Ranks()


@contextmanager
def join(seconds: float = SECONDS, environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """Meet the other processes, if torchrun started this one (it says so by RANK and WORLD_SIZE); else be alone."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        yield SINGLE
        return
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    # A process that waits for rank 0 gives rank 0 the time to find out which process it waits for itself.
    wait = seconds if rank == 0 else 2 * seconds
    with _stored():
        meeting = Meeting(environment, wait) if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None
        job = None if meeting is None else meeting.job
        restarts = meeting.count() if meeting is not None and rank == 0 else 0
    if size == 1:
        yield Ranks(seconds=seconds, job=job, restarts=restarts, meeting=meeting)
        return
    local = int(environment.get("LOCAL_RANK", "0"))
    # Of all processes or of none: gloo and NCCL do not speak with one another.
    gpu = torch.cuda.is_available() and int(environment.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    device = torch.device("cuda", local) if gpu else _CPU
    if gpu:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=wait)
    try:
        store = None if meeting is None else meeting.store(rank, size)
        dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=size, timeout=limit)
        tensors = dist.group.WORLD
        words = dist.new_group(backend="gloo", timeout=limit) if gpu else tensors
    except (RuntimeError, ValueError) as error:
        where = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        raise RankError(
            f"rank {rank} of {size} did not meet the others at {where} ({short(error)}); check that all machines were "
            "started, reach that address, and have the same --nnodes"
        ) from None
    sound = True
    try:
        yield Ranks(rank, size, device, seconds, tensors, words, job, restarts, meeting)
    except RankError:
        sound = False  # taking leave of a process that has ended may wait for ever
        raise
    finally:
        if sound:
            dist.destroy_process_group()


@contextmanager
def _stored() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"torchrun's store cannot be reached ({short(error)}); start it again") from None


@contextmanager
def _flat(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of one type as one vector, put back in the end."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    yield flat
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

"""This process among the processes of a training, and the few things that they send to one another.

A training is one process, or several that torchrun starts, perhaps on several machines. They are numbered: rank 0 leads. It alone
draws users and noise, writes the ledger and the run folder, and prints; the others get their part of every batch from it.

    sum_to_first_, share_     tensors, in one flattened message: reduce to rank 0, broadcast from rank 0
    broadcast, gather, deal   JSON from rank 0 to all; JSON from all to rank 0; an array from rank 0 to each its own

All of it travels by gloo between CPUs, also where networks are on GPUs. JSON and arrays go point to point between rank 0 and one
other, so that a process that has ended or hangs can be named. Rank 0 waits for no process longer than `seconds`, and the others
for rank 0 at most twice as long; a process that has ended is noticed at once. After an error the processes are no longer in step:
a process that gets a `RankError` must end.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from platform import node
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpformer.errors import DPFormerError, RankError

# torch's own limit; loading data and the first answers of rank 0 must fit in.
SECONDS = 1800.0
_STOPPED = -1
_CPU = torch.device("cpu")


class LeaderError(RankError):
    """Rank 0 cannot go on, and says why itself."""


@dataclass(frozen=True)
class Ranks:
    """This process among `size`. Alone (the default), every exchange is trivial and torch.distributed is not touched.

    device: where this process has its network.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU
    seconds: float = SECONDS

    @property
    def first(self) -> bool:
        """Is this the process that leads?"""
        return self.rank == 0

    @property
    def others(self) -> range:
        """The ranks that follow."""
        return range(1, self.size)

    def release_others(self) -> Ranks:
        """On rank 0: tell the others that they are not needed, and be one process from now on."""
        self.broadcast(None)
        return replace(self, size=1)

    def stop_others(self) -> None:
        """On rank 0, which cannot go on: let the others end, wherever they wait for it."""
        for rank in self.others:
            with suppress(RankError):  # it may have ended by itself
                self._send(None, rank)

    def sum_to_first_(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all ranks into rank 0's tensors; what the others' hold after it is of no use: one reduce."""
        if self.size > 1:
            with self._waiting("all others, one of which"), _flat(tensors) as flat:
                dist.reduce(flat, dst=0)

    def share_(self, tensors: Sequence[Tensor]) -> None:
        """Put rank 0's tensors into those of all ranks, bit for bit: one broadcast."""
        if self.size > 1:
            with self._waiting("all others, one of which"), _flat(tensors) as flat:
                dist.broadcast(flat, src=0)

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

    def _send(self, value: bytes | None, rank: int) -> None:
        """None says: rank 0 cannot go on."""
        with self._waiting(f"rank {rank} of {self.size}, which"):
            dist.send(torch.tensor([_STOPPED if value is None else len(value)]), dst=rank)
            if value:
                dist.send(torch.frombuffer(bytearray(value), dtype=torch.uint8), dst=rank)

    def _receive(self, rank: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        with self._waiting(f"rank {rank} of {self.size}, which"):
            dist.recv(size, src=rank)
            if int(size) == _STOPPED:
                raise LeaderError("rank 0 cannot go on; it says why")
            value = torch.zeros(int(size), dtype=torch.uint8)
            if len(value):
                dist.recv(value, src=rank)
        return value.numpy().tobytes()

    @contextmanager
    def _waiting(self, whom: str) -> Iterator[None]:
        """An exchange with other ranks; torch's error becomes one that says what became of them."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            fate = f"has ended: killed, crashed or out of memory, or its network is down ({_short(error)})"
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                fate = (
                    f"has not answered in time (--timeout {self.seconds:g} s): it hangs, or its machine or network is down; end "
                    "all processes before you go on"
                )
            raise RankError(f"rank {self.rank} waited for {whom} {fate}") from None


SINGLE = Ranks()


@contextmanager
def join(
    seconds: float = SECONDS, environment: Mapping[str, str] = os.environ, device: str = "auto"
) -> Iterator[Ranks]:
    """Meet the other processes, if torchrun started this one (it says so by RANK and WORLD_SIZE); else be alone.

    device: of a process that is alone; see `choose_device`. An error of rank 0 ends the others too, which leave the word to
    rank 0. A program of the caller's may have met already.
    """
    if dist.is_available() and dist.is_initialized():
        if (backend := dist.get_backend()) != "gloo":
            raise RankError(f"this program began a process group of {backend}; leave that out, or take gloo")
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), seconds=seconds)
        with _stopping_others(ranks):
            yield ranks
        return
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        yield Ranks(device=choose_device(device, torch.cuda.is_available()))
        return
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    # Rank 0 may itself be waiting for another rank, so the others wait twice as long.
    wait = seconds if rank == 0 else 2 * seconds
    store = _first_start(environment, rank, wait)
    if size == 1:
        yield Ranks(device=choose_device(device, torch.cuda.is_available()), seconds=seconds)
        return
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=wait))
    except (RuntimeError, ValueError) as error:
        where = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        raise RankError(
            f"rank {rank} of {size} did not meet the others at {where} ({_short(error)}); check that all machines were "
            "started, reach that address, and have the same --nnodes"
        ) from None
    ranks = Ranks(rank, size, _own_device(environment), seconds)
    sound = True
    try:
        with _stopping_others(ranks):
            yield ranks
    except RankError:
        sound = False  # taking leave of a process that has ended may wait for ever
        raise
    finally:
        if sound:
            dist.destroy_process_group()


def _first_start(environment: Mapping[str, str], rank: int, seconds: float) -> Any:
    """A part of torchrun's store for this meeting; None where torchrun has no store. Refuses processes that were started again.

    The store outlives the processes. How often torchrun has restarted does not tell a second start: every machine counts for
    itself, and one that starts again because another one failed does not count that. So each process leaves its name there.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    own, address, port = f"{node()} {os.getpid()}", environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        server = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))  # type: ignore[attr-defined]
        # Several torchruns may meet at one address, each under an id.
        store = dist.PrefixStore(f"dpformer/{environment.get('TORCHELASTIC_RUN_ID', '')}", server)  # type: ignore[attr-defined]
        before = store.compare_set(f"process {rank}", "", own).decode()
        meeting = store.add(f"meetings {rank}", 1)
    except RuntimeError as error:
        raise RankError(f"torchrun's store cannot be reached ({_short(error)}); start it again") from None
    if before != own:
        raise RankError(
            f"torchrun has started rank {rank} again (before it was process {before}). This start has begun and charged nothing, "
            "and the run that was begun is kept: go on with `dpformer resume RUN` at no cost (a program of your own: start it "
            "anew). Leave out --max-restarts"
        )
    return dist.PrefixStore(str(meeting), store)  # type: ignore[attr-defined]


@contextmanager
def _stopping_others(ranks: Ranks) -> Iterator[None]:
    """Let the others end when rank 0 has an error of its own."""
    try:
        yield
    except RankError:
        raise
    except (Exception, KeyboardInterrupt):
        if ranks.first:
            ranks.stop_others()
        raise


class Membership:
    """This process among the others, as of `join`, for a program that has no `with` around its training."""

    def __init__(self) -> None:
        self._left = ExitStack()
        self._ranks = self._left.enter_context(join())

    @contextmanager
    def exchange(self) -> Iterator[Ranks]:
        """Something that all processes do. An error of one ends it for all: they are out of step afterwards."""
        try:
            yield self._ranks
        except BaseException as error:
            self._left.__exit__(type(error), error, error.__traceback__)
            if isinstance(error, LeaderError) or not isinstance(error, RankError):
                raise
            raise RankError(f"{error}. Start the program again: what was charged is not charged again") from None

    def leave(self) -> None:
        """Take part no longer."""
        self._left.close()


def choose_device(name: str, cuda: bool) -> torch.device:
    """The device of a process that is alone: "auto", "cpu", "cuda" (or "cuda:1"). cuda: whether there is a GPU."""
    if name == "auto":
        return torch.device("cuda") if cuda else _CPU
    if name == "mps":
        raise DPFormerError(
            "--device mps: Apple's GPU has no float64, and the bound on one person's part of a sum needs it; use --device cpu"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise DPFormerError(f"--device {name}: there is no such device; use auto, cpu or cuda")
    if device.type == "cuda" and not cuda:
        raise DPFormerError(f"--device {name}: torch finds no GPU of this kind here; use --device cpu")
    return device


def _own_device(environment: Mapping[str, str]) -> torch.device:
    """A GPU of this process alone, where the machine has one for each of its processes."""
    if torch.cuda.is_available() and int(environment.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count():
        return torch.device("cuda", int(environment.get("LOCAL_RANK", "0")))
    return _CPU


def _short(error: Exception) -> str:
    """What torch says, in a line and without its own file names."""
    return re.sub(r"^\[[^\]]*\] *", "", " ".join(str(error).split())).split(". ")[0][:200]


@contextmanager
def _flat(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of one type as one vector on the CPU, put back in the end."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()
    yield flat
    with torch.no_grad():
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

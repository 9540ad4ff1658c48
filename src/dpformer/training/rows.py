"""What a step of several ranks, each with its rows of the tables, does together besides clipping.

- Who is drawn: rank 0 draws, and tells the others.
- The ledger: rank 0's. It charges a step by the noise and the inputs of all ranks, and no rank adds noise before rank 0 has synced
  that line and said so.
- Noise: every rank adds it to its own rows, from a source of its own; what every rank has gets rank 0's, and the noisy sum is sent to the
  others. So each number of the sum gets noise once, and no two of them from one stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpformer.errors import DPFormerError, PrivacyError
from dpformer.privacy import Account, Ledger, NoiseSource, Position, PrivacyPlan, fingerprint
from dpformer.rows import Rows


def from_first(rows: Rows, value: np.ndarray) -> np.ndarray:
    """Rank 0's array of one dimension, on all ranks."""
    size = torch.tensor([len(value)])
    dist.broadcast(size, 0, group=rows.group)
    sent = torch.from_numpy(value).clone() if rows.rank == 0 else torch.from_numpy(np.empty(int(size), value.dtype))
    dist.broadcast(sent, 0, group=rows.group)
    return sent.numpy()


def seed_of(seed: int | None, rank: int) -> int | None:
    """A seed for the noise of each rank, for a run that is seeded: rank 0 has the run's own."""
    if seed is None or rank == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"noise of rank {rank} with seed {seed}".encode()).digest()[:7], "little")


class RankLedger:
    """The ledger as each rank sees it: only rank 0 has one to write, and all wait for its word. Asking is a collective."""

    def __init__(self, plan: PrivacyPlan, rows: Rows, ledger: Ledger | None) -> None:
        if (ledger is None) == (rows.rank == 0):
            raise PrivacyError("rank 0 writes the ledger, and no other rank does")
        self.plan, self.rows, self._ledger = plan, rows, ledger

    def authorise_step(self, step: int, noise: str, inputs: str) -> bool:
        """As `Ledger.authorise_step`, for the noise and inputs of all ranks together. The error of rank 0 is everybody's."""
        every = [torch.empty(64, dtype=torch.uint8) for _ in range(self.rows.size)]
        dist.all_gather(every, _bytes(bytes.fromhex(noise) + bytes.fromhex(inputs)), group=self.rows.group)
        found = [bytes(one.tolist()) for one in every]
        return self._told(lambda ledger: self._charge(ledger, step, found))

    def authorise_release(self, name: str, noise: str, inputs: str) -> bool:
        """As `Ledger.authorise_release`: rank 0's noise, and rank 0's alone to ask for."""
        return self._own().authorise_release(name, noise, inputs)

    def account(self) -> Account:
        """What the ledger says; on rank 0."""
        return self._own().account()

    def position(self) -> Position:
        """How far the ledger has come; on rank 0."""
        return self._own().position()

    @property
    def run_id(self) -> str:
        """The run's; on rank 0."""
        return self._own().run_id

    def close(self) -> None:
        """Let another process open the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    def _own(self) -> Ledger:
        if self._ledger is None:
            raise PrivacyError(f"rank {self.rows.rank} has no ledger: rank 0 has it")
        return self._ledger

    def _charge(self, ledger: Ledger, step: int, every: list[bytes]) -> bool:
        noises = [one[:32] for one in every]
        if len(set(noises)) < len(noises):
            raise PrivacyError(
                "two ranks would draw the same noise, and the difference of their rows would have less than it should: every rank "
                "needs a noise source of its own"
            )
        return ledger.authorise_step(step, fingerprint(*noises), fingerprint(*every))

    def _told(self, ask: Any) -> bool:
        """What rank 0's ledger answers, on all ranks."""
        answer, said = False, ""
        error: Exception | None = None
        if self._ledger is not None:
            try:
                answer = ask(self._ledger)
            except DPFormerError as problem:
                error, said = problem, str(problem)
        told = from_first(self.rows, np.frombuffer(bytes([answer]) + said.encode(), dtype=np.uint8))
        if error is not None:
            raise error
        if len(told) > 1:
            raise PrivacyError(f"rank 0: {bytes(told[1:].tolist()).decode()}")
        return bool(told[0])


class RowNoise(NoiseSource):
    """The noise of one rank: `source` is its own. Adding noise is a collective."""

    def __init__(self, source: NoiseSource, rows: Rows, split: Iterable[str]) -> None:
        """split: names of the parameters that are parts of a table."""
        self.source, self.rows, self.split = source, rows, frozenset(split)
        self.mode, self.insecure, self.dtype = source.mode, source.insecure, source.dtype

    def normal(self, count: int) -> np.ndarray:
        """Of this rank's source."""
        return self.source.normal(count)

    def state(self) -> dict[str, Any]:
        """Of this rank's source."""
        return self.source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Of this rank's source."""
        self.source.restore(state)

    def add_noise_(self, gradients: Iterable[tuple[str, Tensor]], std: float) -> None:
        """Noise for this rank's rows; and for all else that of rank 0, with rank 0's sum.

        A sum that is not finite on any rank is refused on all, before anything is drawn.
        """
        named = list(gradients)
        broken = torch.tensor([not all(bool(torch.isfinite(g).all()) for _, g in named)], dtype=torch.int32)
        if bool(self.rows.max_(broken)):
            raise PrivacyError("the clipped sum of a parameter is not finite on some rank; nothing was released")
        own = [(name, g) for name, g in named if self.rows.rank == 0 or name in self.split]
        self.source.add_noise_(own, std)
        for name, gradient in sorted(named, key=lambda pair: pair[0]):
            if name not in self.split:
                dist.broadcast(gradient, 0, group=self.rows.group)


@torch.no_grad()
def begin_alike(model: torch.nn.Module, rows: Rows) -> None:
    """Give every rank rank 0's parameters, but for its rows of the tables; and its random numbers, for the same dropout."""
    split = split_names(model)
    for name, p in model.named_parameters():
        if name not in split:
            dist.broadcast(p.data, 0, group=rows.group)
    state = torch.get_rng_state()
    dist.broadcast(state, 0, group=rows.group)
    torch.set_rng_state(state)


def split_names(model: torch.nn.Module) -> set[str]:
    """Names of a model's parameters that are parts of a table."""
    found: set[str] = set()
    for prefix, part in model.named_modules():
        if isinstance(getattr(part, "rows", None), Rows):
            found |= {f"{prefix}.{name}" if prefix else name for name, _ in part.named_parameters(recurse=False)}
    return found


def _bytes(value: bytes) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)

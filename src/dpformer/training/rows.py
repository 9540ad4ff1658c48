"""What the ranks of a training with split tables do together in a step, besides clipping.

- Who is drawn: rank 0 draws, and tells the others.
- The ledger: rank 0's. It charges a step by the noise and the inputs of all ranks, and no rank adds noise before rank 0 has
  synced that line and said so.
- Noise: every rank adds it to its own rows, from a source of its own; what every rank has gets rank 0's, and the noisy sum is
  sent to the others. So each number of the sum gets noise once, and no two of them from one stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.errors import PrivacyError
from dpformer.privacy import Account, Ledger, NoiseSource, Position, PrivacyPlan, fingerprint
from dpformer.rows import Rows
from dpformer.training.ranks import Ranks


def split_names(model: nn.Module) -> set[str]:
    """Names of a model's parameters that are parts of a table."""
    found: set[str] = set()
    for prefix, part in model.named_modules():
        if isinstance(getattr(part, "rows", None), Rows):
            found |= {f"{prefix}.{name}" if prefix else name for name, _ in part.named_parameters(recurse=False)}
    return found


def begin_alike(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank rank 0's parameters, but for its rows of the tables; and its random numbers, for the same dropout."""
    split = split_names(model)
    ranks.share_([p for name, p in model.named_parameters() if name not in split])
    state = ranks.tell_bytes(torch.get_rng_state().numpy().tobytes())
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def seed_of(seed: int | None, rank: int) -> int | None:
    """A seed for the noise of each rank, for a run that is seeded: rank 0 has the run's own."""
    if seed is None or rank == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"noise of rank {rank} with seed {seed}".encode()).digest()[:7], "little")


class RowNoise(NoiseSource):
    """The noise of one rank: `source` is its own. split: names of parameters that are parts of tables. Adding is a collective."""

    def __init__(self, source: NoiseSource, ranks: Ranks, split: Iterable[str]) -> None:
        self.source, self.ranks, self.split = source, ranks, frozenset(split)
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
        named = sorted(gradients, key=lambda pair: pair[0])
        if self.ranks.agree(not all(bool(torch.isfinite(g).all()) for _, g in named)):
            raise PrivacyError("the clipped sum of a parameter is not finite on some rank; nothing was released")
        self.source.add_noise_([(name, g) for name, g in named if self.ranks.first or name in self.split], std)
        self.ranks.share_([g for name, g in named if name not in self.split])


class RankLedger:
    """The ledger as each rank sees it: only rank 0 has one to write, and all wait for its word. Asking is a collective."""

    def __init__(self, plan: PrivacyPlan, ranks: Ranks, ledger: Ledger | None) -> None:
        if (ledger is None) == ranks.first:
            raise PrivacyError("rank 0 writes the ledger, and no other rank does")
        self.plan, self.ranks, self._ledger = plan, ranks, ledger
        # What is the same on all ranks, and what else determines a step on this one; a trainer puts its own here.
        self.alike: Callable[[], str] = str
        self.also: Callable[[], str] = str

    def authorise_step(self, step: int, noise: str, inputs: str) -> bool:
        """As `Ledger.authorise_step`, for the noise and the inputs of all ranks together; what rank 0 refuses ends all."""
        every = self.ranks.hear([noise, fingerprint(inputs, self.also()), fingerprint(str(step), self.alike())])
        with self.ranks.leading():
            return bool(self.ranks.tell(self._charge(step, every) if self.ranks.first else None))

    def _charge(self, step: int, every: list[list[str]]) -> bool:
        for rank, (_, _, alike) in enumerate(every):
            if alike != every[0][2]:
                raise PrivacyError(
                    f"rank {rank} is at another step, or has other data, settings or weights than rank 0: nothing was spent on "
                    "this step. See that all machines have the same version of dpformer and torch, and the same data"
                )
        noises = [noise for noise, _, _ in every]
        if len(set(noises)) < len(noises):
            raise PrivacyError(
                "two ranks would draw the same noise, and the difference of their rows would show less of it than was paid for: "
                "every rank needs a noise source of its own"
            )
        return self._own().authorise_step(
            step, fingerprint(*noises), fingerprint(*noises, *(own for _, own, _ in every))
        )

    def authorise_release(self, name: str, noise: str, inputs: str) -> bool:
        """As `Ledger.authorise_release`: of rank 0's noise, and for rank 0 alone to ask."""
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
            raise PrivacyError(f"rank {self.ranks.rank} has no ledger: rank 0 has it")
        return self._ledger

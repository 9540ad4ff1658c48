"""The sum of clipped gradients over the people drawn, as a query: what the two ways to make micro-batches share.

    sum over the people drawn of c_i g_i        in whole steps of the grid; see `groups` for its sensitivity

`ModuleSum` is handed micro-batches from outside; `fit.gradient_sum.GradientSum` cuts them out of sequences.

Several processes share the groups out. Which process has a group depends on the group's number alone, and whole numbers add up
to the same in any order, so a run may go on with another number of processes:

    rank 0                                              the others
    `order`: sends grid, key and weights, deals people -> `follow`: each sums the groups that are its own
    `collect`: adds up all sums, as whole numbers      <- `collect`: send theirs

The Curator with its noise and ledger is rank 0's; the others hold people's data, and send sums to rank 0 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.clipping import PhantomClipping
from dpformer.errors import PrivacyError
from dpformer.models.dropout import Masks, is_random, use_masks
from dpformer.privacy import Sample
from dpformer.privacy.noise import kept_by_dropout
from dpformer.privacy.plan import GRADIENTS
from dpformer.training.groups import Groups, add_rounded, check_dropout, check_precision, check_room, whole_sums
from dpformer.training.ranks import SINGLE

Losses = Callable[[], Tensor]
MasksOf = Callable[[np.ndarray], Masks]


@dataclass
class Report:
    """What the last sum tells the one who runs it. Computed on private data without noise: never released.

    loss: summed over the people. stop: another process that took part was asked to stop.
    """

    users: int = 0
    loss: float = 0.0
    nonfinite: int = 0
    stop: bool = False

    @property
    def mean_loss(self) -> float:
        """The loss of a person, on average."""
        return self.loss / max(1, self.users)


class ClippedSum:
    """The sum of the clipped gradients of a module over the people drawn. See `privacy.query.Query`.

    clipping: None only for a plan with epsilon inf. report: of the last sum. ranks: the processes that share the groups.
    """

    name = GRADIENTS

    def __init__(self, module: nn.Module, clipping: PhantomClipping | None, groups: Groups) -> None:
        self.module, self.clipping, self.groups = module, clipping, groups
        self.report, self.ranks = Report(), SINGLE

    @property
    def bound(self) -> float:
        """The clipping norm C; 1 without clipping, where no noise is added."""
        return 1.0 if self.clipping is None else self.clipping.clip.max_norm

    @property
    def numbers(self) -> int:
        """How many numbers the module learns."""
        return sum(p.numel() for _, p in trainable(self.module))

    def sensitivity(self, grid: float) -> float:
        """C / g (1 + 1e-6 + t m 2^-21) + t sqrt(d); see `training.groups`."""
        return self.groups.sensitivity(self.bound, self.numbers, grid)

    def check(self, people: int, grid: float) -> None:
        """Refuse, before anything is computed, what the sensitivity does not hold for."""
        check_precision(self.module)
        check_dropout(self.module)
        if self.clipping is not None:
            check_room(people, self.bound, grid)

    def masks(self, key: bytes) -> MasksOf | None:
        """The dropout masks of people, if the module has any. key: of the step."""
        return (lambda people: PersonMasks(key, people)) if is_random(self.module) else None

    def whole(self, totals: list[Tensor]) -> dict[str, np.ndarray]:
        """Sums by the parameters' names, int64."""
        return whole_sums([name for name, _ in trainable(self.module)], totals)

    def order(self, sample: Sample, grid: float) -> Sample:
        """On rank 0: let all processes begin the sum; returns this one's part of the people."""
        if self.ranks.size == 1:
            return sample
        self.ranks.broadcast({"grid": grid, "key": sample.key.hex()})
        owner = sample.drawn // self.groups.block % self.ranks.size
        mine = self.ranks.deal([sample.drawn[owner == rank] for rank in range(self.ranks.size)])
        self._share_weights()
        return Sample(mine, sample.key)

    def follow(self, order: Mapping[str, Any]) -> tuple[Sample, float]:
        """On the others: this one's part of what rank 0 has ordered, and the grid."""
        mine = self.ranks.deal()
        self._share_weights()
        return Sample(mine, bytes.fromhex(order["key"])), float(order["grid"])

    def _share_weights(self) -> None:
        buffers = [b for b in self.module.buffers() if b.is_floating_point()]  # tracked variances change too
        self.ranks.share_([*(p.data for _, p in trainable(self.module)), *buffers])

    def collect(self, sums: dict[str, np.ndarray], stop: bool = False) -> dict[str, np.ndarray]:
        """On rank 0: the sum of all processes. stop: was this process asked to stop?"""
        if self.ranks.size == 1:
            return sums
        own = self.report
        # Here rank 0 waits for the slowest; then all parts of the sum are complete.
        reports = self.ranks.gather([own.users, own.loss, own.nonfinite, stop])
        if reports:
            users, loss, nonfinite, stops = (sum(values) for values in zip(*reports, strict=True))
            self.report = Report(users, loss, nonfinite, stops > 0)
        tensors = [torch.from_numpy(value) for value in sums.values()]
        self.ranks.sum_to_first_(tensors)
        return {name: value.numpy() for name, value in zip(sums, tensors, strict=True)}


class GroupSums:
    """Gradients of micro-batches (`.grad`), their float64 sum over a group, and the sums of groups in whole steps.

    Micro-batches of a group are added in float64: rounding in a long float32 sum grows with its length. The numbers of all
    parameters of one type are parts of one tensor, so that dozens of small ones are cleared and added at once; memory is kept
    from sum to sum, because fresh memory costs more than the arithmetic.
    """

    def __init__(self) -> None:
        # By type and device: gradient, sum of the group, sum of all groups.
        self._flat: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor, Tensor]] = {}
        self.gradients: list[Tensor] = []
        self.totals: list[Tensor] = []

    def start(self, module: nn.Module) -> None:
        """Begin with zeros, for the trainable parameters of a module."""
        parameters = [p for _, p in trainable(module)]
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        places = []
        for p in parameters:
            kind = (p.dtype, p.device)
            places.append((kind, sizes.get(kind, 0)))
            sizes[kind] = sizes.get(kind, 0) + p.numel()
        self._flat = {kind: self._zeros(kind, size) for kind, size in sizes.items()}
        parts = [
            [flat[start : start + p.numel()].view(p.shape) for flat in self._flat[kind]]
            for p, (kind, start) in zip(parameters, places, strict=True)
        ]
        self.gradients, self.totals = [part[0] for part in parts], [part[2] for part in parts]

    def _zeros(self, kind: tuple[torch.dtype, torch.device], size: int) -> tuple[Tensor, Tensor, Tensor]:
        there = self._flat.get(kind)
        if there is None or len(there[0]) != size:
            types = (kind[0], torch.float64, torch.float64)
            gradient, own, total = (torch.zeros(size, dtype=one, device=kind[1]) for one in types)
            return gradient, own, total
        for flat in there:
            flat.zero_()
        return there

    def attach(self, module: nn.Module) -> None:
        """Let backward passes add to these gradients, from zeros on."""
        for flat in self._flat.values():
            flat[0].zero_()
        for (_, p), gradient in zip(trainable(module), self.gradients, strict=True):
            p.grad = gradient

    def take(self) -> None:
        """Add the gradient of a micro-batch to its group's sum, and clear it."""
        for gradient, own, _ in self._flat.values():
            own.add_(gradient)
            gradient.zero_()

    def end_group(self, grid: float) -> None:
        """Round the group's sum to whole steps, and begin the next."""
        for _, own, total in self._flat.values():
            add_rounded(total, own, 1 / grid)
            own.zero_()

    def add(self, other: GroupSums) -> None:
        """Add the groups that another has summed: whole numbers below 2^53, so it is exact."""
        for kind, (_, _, total) in self._flat.items():
            total += other._flat[kind][2]


def add_gradients(module: nn.Module, clipping: PhantomClipping | None, losses: Losses, masks: Masks | None) -> float:
    """Add the (clipped) gradients of a micro-batch to `.grad`; returns the sum of its losses."""
    values: list[Tensor] = []

    def noted() -> Tensor:
        value = losses()
        values.append(value.detach())
        return value

    if masks is not None:
        use_masks(module, masks)
    try:
        if clipping is not None:
            clipping.backward(noted)
        else:
            noted().sum().backward()
    finally:
        if masks is not None:
            use_masks(module, None)
    return float(torch.nan_to_num(values[0]).sum())


class PersonMasks:
    """Dropout masks of a micro-batch by a cipher: each person's is a function of step and person alone; see `models.dropout`."""

    def __init__(self, key: bytes, users: np.ndarray) -> None:
        self._key, self._users, self._calls = key, users, 0

    def __call__(self, shape: tuple[int, ...], rate: float) -> Tensor:
        """The factors of the next call, [B, ...]."""
        if shape[0] != len(self._users):
            raise PrivacyError(
                f"dropout on {shape[0]} samples in a micro-batch of {len(self._users)} people; it is refused"
            )
        count = math.prod(shape[1:])
        kept = np.stack([kept_by_dropout(self._key, int(user), self._calls, count, rate) for user in self._users])
        self._calls += 1
        return torch.from_numpy(kept.reshape(shape)).float() / (1 - rate)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that steps change, by name; a shared one once."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]

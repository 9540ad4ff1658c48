"""What must stay as it is between two steps: weights, settings of the optimiser, its parameters; and what moved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dpformer.errors import PrivacyError
from dpformer.training.clipped_sum import trainable


class Watch:
    """Notices weights, buffers and learning rates that change outside of steps, and an optimiser of other parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._names = [name for name, _ in trainable(model)]
        self._seen: dict[str, tuple[int, int]] = {}
        self.check_parameters()
        self.note()

    def note(self) -> None:
        """Remember the weights and the settings of the optimiser as they are now."""
        self._settings = settings(self.optimizer)
        self._seen = {name: fingerprint(value) for name, value in everything(self.model).items()}

    def check(self) -> None:
        """Refuse weights that are not those of the last `note`, and parameters other than those at the start."""
        now = everything(self.model)
        changed = [
            name for name in {**self._seen, **now} if name not in now or fingerprint(now[name]) != self._seen.get(name)
        ]
        if changed:
            raise PrivacyError(
                f"{changed[0]!r} of the model has changed outside of the steps: what it holds now may come from people's data "
                "without noise. Leave out what changes it (an update by hand, statistics of batches as a buffer); to go on from "
                "the last checkpoint, start the program again"
            )
        self.check_parameters()
        changed = [name for name, value in settings(self.optimizer).items() if value != self._settings.get(name)]
        if changed:
            raise PrivacyError(
                f"{changed[0]} has changed outside of the steps: if it follows losses, these have no noise, and the next step "
                "would tell of them. Choose a schedule beforehand and give it with scheduler="
            )

    def check_parameters(self) -> None:
        """The optimiser must hold the trainable parameters of the model, and no others, as when training began."""
        names = {id(p): name for name, p in trainable(self.model)}
        if list(names.values()) != self._names:
            other = sorted(set(names.values()) ^ set(self._names))
            raise PrivacyError(
                f"the model trains other parameters than when the loop began: {other[0] if other else 'their order'!r}. "
                "Freeze or add parameters before"
            )
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        if outside := [p for p in held if p.requires_grad and id(p) not in names]:
            raise PrivacyError(
                f"the optimiser holds a parameter of shape {tuple(outside[0].shape)} that is not in the model: it would get no "
                "clipping and no noise. Give PrivateTraining the one module that holds them all"
            )
        missing = names.keys() - {id(p) for p in held}
        if missing:
            first = next(name for key, name in names.items() if key in missing)
            raise PrivacyError(
                f"the optimiser does not hold parameter {first!r}, which would be clipped and paid for in vain. Give it to the "
                "optimiser, or freeze it by requires_grad_(False)"
            )


@dataclass(frozen=True)
class Movement:
    """How far the trained parameters are from where they began, and the names of those that did not move."""

    distance: float
    start_norm: float
    still: tuple[str, ...]

    def text(self) -> str:
        """In one line."""
        part = f", {100 * self.distance / self.start_norm:.3g} % of their norm" if self.start_norm else ""
        still = f"; not moved at all: {', '.join(self.still)}" if self.still else ""
        return f"the weights moved by {self.distance:.4g}{part}{still}"

    @classmethod
    def since(cls, file: Path, weights: dict[str, Tensor]) -> Movement:
        """From the weights in a safetensors file to these."""
        distances, norms = {}, []
        with safe_open(file, framework="pt") as start:
            for name, value in weights.items():
                before = start.get_tensor(name)
                distances[name] = float(torch.dist(value.cpu(), before))
                norms.append(float(before.norm()))
        still = tuple(name for name, distance in distances.items() if not distance)
        return cls(math.hypot(*distances.values()), math.hypot(*norms), still)


def settings(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Learning rate and all else that an optimiser has for each group of parameters."""
    return {
        f"{name} of the optimiser" + (f" (group {number})" if number else ""): _plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, those that are not saved included."""
    return {**model.state_dict(), **dict(model.named_buffers(remove_duplicate=False))}


def fingerprint(value: Tensor) -> tuple[int, int]:
    """The number of bytes, and their sum as 64-bit numbers: against mistakes, not against forgery."""
    flat = value.detach().reshape(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    flat = flat.view(torch.uint8)
    whole = len(flat) // 8 * 8
    return len(flat), int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())


def refuse_length(epochs: float | None, steps: int | None, micro_batch: int) -> None:
    """Refuse a length that is given twice or not at all, and micro-batches of nobody."""
    if (epochs is None) == (steps is None):
        raise PrivacyError("give either epochs or steps")
    if micro_batch < 1:
        raise PrivacyError(f"micro_batch is {micro_batch}; it is at least 1")


def refuse_unsuited(model: nn.Module, optimizer: object, scheduler: object) -> None:
    """What the loop cannot train privately, with the cure."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise PrivacyError(
            f"the model is wrapped in {type(model).__name__}, which adds up gradients without clipping; give model.module"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrivacyError(f"the optimiser is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PrivacyError("LBFGS asks for several gradients in a step, and a step pays for one; take SGD or Adam")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise PrivacyError("ReduceLROnPlateau follows losses without noise; choose a schedule that is fixed beforehand")

"""The independent arithmetic: one sample at a time through plain autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Losses = Callable[..., Tensor]


@dataclass(frozen=True)
class Subject:
    """A model under test.

    losses(module, *samples): one loss a sample, `[B]`, as it is trained. samples: tensors whose first dimension is the sample.
    reference(module, *samples): the same loss for a single sample, from its definition; `losses` itself where there is no other.
    """

    module: nn.Module
    losses: Losses
    samples: tuple[Tensor, ...]
    reference: Losses | None = None
    max_norm: float = 1.0
    rule: Literal["automatic", "flat"] = "automatic"

    @property
    def size(self) -> int:
        """How many samples."""
        return len(self.samples[0])

    def exact(self) -> Subject:
        """A copy in float64, without dropout, that can be differentiated and changed at will."""
        module = copy.deepcopy(self.module).double().eval()
        return Subject(module, self.losses, _double(self.samples), self.reference, self.max_norm, self.rule)

    def take(self, places: list[int]) -> tuple[Tensor, ...]:
        """Some samples."""
        return tuple(value[places] for value in self.samples)


@dataclass(frozen=True)
class Loop:
    """Gradients of every sample by name (None where the loss does not reach a parameter), their norms `[B]`, losses `[B]`."""

    gradients: list[dict[str, Tensor | None]]
    norms: Tensor
    losses: Tensor

    def weighted(self, weights: Tensor, like: nn.Module) -> dict[str, Tensor]:
        """sum_i weights[i] g_i."""
        total = {name: torch.zeros_like(p) for name, p in trainable(like).items()}
        for weight, sample in zip(weights, self.gradients, strict=True):
            for name, gradient in sample.items():
                if gradient is not None:
                    total[name] += weight * gradient
        return total


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def loop(subject: Subject) -> Loop:
    """Differentiate each sample alone. `subject` should be in float64, see `Subject.exact`."""
    parameters = trainable(subject.module)
    alone = subject.reference or subject.losses
    gradients: list[dict[str, Tensor | None]] = []
    norms, losses = [], []
    for i in range(subject.size):
        loss = alone(subject.module, *subject.take([i])).sum()
        losses.append(loss.detach())
        gradient: tuple[Tensor | None, ...]
        if loss.requires_grad:
            gradient = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        else:
            gradient = (None,) * len(parameters)
        gradients.append(dict(zip(parameters, gradient, strict=True)))
        norms.append(
            torch.sqrt(
                torch.stack(
                    [
                        torch.zeros((), dtype=torch.float64),
                        *(g.double().square().sum() for g in gradient if g is not None),
                    ]
                ).sum()
            )
        )
    return Loop(gradients, torch.stack(norms), torch.stack(losses).double())


def factors(norms: Tensor, max_norm: float, rule: str) -> Tensor:
    """The clip factors `[B]` of the two rules, from their definitions."""
    if rule == "flat":
        return (max_norm / norms.clamp_min(1e-300)).clamp_max(1)
    return max_norm / (norms + 0.01)


def size(total: dict[str, Tensor]) -> float:
    """The L2 norm over all parameters."""
    return float(torch.sqrt(sum((value.double().square().sum() for value in total.values()), torch.zeros(()).double())))


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """|a - b| / |b|."""
    return size({name: a[name].double() - b[name].double() for name in b}) / max(size(b), 1e-300)


def _double(samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.double() if value.is_floating_point() else value for value in samples)

"""Dropout whose masks can be handed in, so that each sample's mask is a function of that sample alone.

torch draws the masks of a whole batch from one generator: if one person left, the masks of all others would change, and the
clipped sum would move by far more than the clipping norm.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

# masks(shape, rate): the factors, 0 or 1 / (1 - rate), of the next call of dropout in a forward pass.
Masks = Callable[[tuple[int, ...], float], Tensor]


class Dropout(nn.Module):
    """Dropout by `masks` where they are set (see `use_masks`), else torch's own."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.masks: Masks | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0 or not self.training:
            return x
        if self.masks is None:
            return F.dropout(x, self.rate)
        return x * self.masks(tuple(x.shape), self.rate).to(x)


def use_masks(module: nn.Module, masks: Masks | None) -> None:
    """Let every `Dropout` of a module take its masks from here."""
    for part in module.modules():
        if isinstance(part, Dropout):
            part.masks = masks


def is_random(module: nn.Module) -> bool:
    """Does a forward pass of training draw random numbers?"""
    return any(isinstance(part, Dropout) and part.rate > 0 for part in module.modules())

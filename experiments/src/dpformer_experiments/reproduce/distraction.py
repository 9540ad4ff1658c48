"""The paper's claim of attention distraction for one query: how noise in the keys moves its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.models import reattention


@dataclass(frozen=True)
class Distraction:
    """Attention of one query over keys with given noise: the true scores, and the expected ones under noise, each `[L]`."""

    true: Tensor
    plain: Tensor
    corrected: Tensor
    literal: Tensor

    def bias(self, which: str) -> float:
        """Total variation between the true scores and the expected ones (`plain`, `corrected`, `literal`)."""
        return float((getattr(self, which) - self.true).abs().sum() / 2)


def distraction(query: Tensor, keys: Tensor, var: Tensor, draws: int, generator: torch.Generator) -> Distraction:
    """The paper's claim as an experiment: keys `[L, d]` with Gaussian noise of variance `var` `[L]`, many draws.

    Expected scores are too large for keys with more noise. The correction on the logits removes that; the paper's formula,
    applied after the softmax, does not.
    """
    L, d = keys.shape
    noisy = keys + var.sqrt()[:, None] * torch.randn(draws, L, d, generator=generator, dtype=keys.dtype)
    logits = noisy @ query / d**0.5
    left, right = reattention.penalty(query.expand(L, d), var, cap=None)
    literal = logits.softmax(-1) * torch.exp(-query.square().sum() / d * var / 2)
    return Distraction(
        true=(keys @ query / d**0.5).softmax(0),
        plain=logits.softmax(-1).mean(0),
        corrected=(logits - left[-1] * right).softmax(-1).mean(0),
        literal=literal.mean(0),
    )

"""Single steps, white-box: noisy sums with and without a canary, and the mu that they show.

The clipped sums are made by Phantom Clipping on real users, with the canary and without it. They do not change from trial to
trial; the noise does, and is drawn anew from the real source for each. See `dpformer.privacy.audit` for the
estimate and its interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from dpformer.clipping import PhantomClipping
from dpformer.data import MicroBatch
from dpformer.privacy import NoiseSource, StepAudit, audit_step
from dpformer.training.trainer import Trainer
from dpformer.trust.verify.steps import losses_of

CONFIDENCE = 0.999
SMALLEST_EXCESS = 0.2
"""The audit is planned to see a contribution that is larger by this share."""

Sums = dict[str, Tensor]


def trials_for(sigma: float) -> int:
    """Trials that show an excess of a fifth: the standard error sqrt(2/n) of mu is a sixth of 0.2 / sigma."""
    return int(np.clip(2 * (6 * sigma / SMALLEST_EXCESS) ** 2, 500, 20_000))


def power(claimed: float, true: float, trials: int, confidence: float = CONFIDENCE) -> float:
    """How surely an interval from so many trials leaves the claim out when mu is `true` (normal approximation)."""
    error = math.sqrt(2 / trials + true**2 / (4 * trials))
    return float(norm.cdf(abs(true - claimed) / error - norm.isf((1 - confidence) / 2)))


def clipped_sum(trainer: Trainer, batch: MicroBatch) -> Sums:
    """The clipped sum of some users, by the trainer's own losses and clipping rule."""
    model = trainer.model
    for p in model.parameters():
        p.grad = None
    losses = losses_of(trainer)
    PhantomClipping(model, trainer.how.max_norm, trainer.how.rule).backward(lambda: losses(model, batch.tokens))
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return found


def measure(
    others: Sums,
    canary: Sums,
    noise: NoiseSource,
    sigma: float,
    max_norm: float,
    trials: int,
    claimed_sigma: float | None = None,
) -> StepAudit:
    """Audit sums `others` and `others + canary` with noise sigma C against the claim 1 / `claimed_sigma` (sigma itself)."""
    together = {name: others[name] + canary[name] for name in others}
    return audit_step(
        _noisy(others, together, noise, sigma * max_norm), canary, claimed_sigma or sigma, trials, CONFIDENCE
    )


def _noisy(others: Sums, together: Sums, noise: NoiseSource, std: float) -> Callable[[bool], Sums]:
    def noisy_sum(with_canary: bool) -> Sums:
        total = {name: value.clone() for name, value in (together if with_canary else others).items()}
        noise.add_noise_(total.items(), std)
        return total

    return noisy_sum


def norm_of(sums: Sums) -> float:
    """L2 norm over all parameters."""
    return math.sqrt(sum(float(torch.sum(value.double() ** 2)) for value in sums.values()))

"""The audit of single steps: it holds the claim of real noise, and sees too little and too much of it."""

import math

import numpy as np
import pytest
import torch

from dpformer.errors import PrivacyError
from dpformer.privacy.noise import rounded_gaussian
from dpformer.trust.audit.step_audit import audit_step, mu_interval

TINY = 1e-6
"""The chance of a false alarm; keys are fixed, so a test passes always or never."""
GRID = 2.0**-27


def run_audit(sigma: float, factor: float, clip: float = 0.5):
    """Audit sums on the grid with the real sampler; `factor` is the planted defect."""
    torch.manual_seed(0)
    canary = {"w": torch.randn(20, 3), "b": torch.randn(7)}
    size = math.sqrt(sum(float(v.square().sum()) for v in canary.values()))
    canary = {name: value * clip / size for name, value in canary.items()}
    others = {name: torch.randn_like(value) for name, value in canary.items()}
    sums = 0

    def noisy_sum(with_canary: bool) -> dict[str, torch.Tensor]:
        nonlocal sums
        noisy = {}
        for name in canary:
            sums += 1
            steps = torch.trunc((others[name] + canary[name] * with_canary).double() / GRID).to(torch.int64).numpy()
            noise = rounded_gaussian(sums.to_bytes(32, "big"), steps.shape, sigma * factor * clip / GRID)
            noisy[name] = torch.from_numpy((steps + noise) * GRID)
        return noisy

    return audit_step(noisy_sum, canary, sigma, trials=1500, confidence=1 - TINY)


def test_a_single_step_audit_holds_the_claim_and_catches_half_the_noise():
    honest = run_audit(1.5, 1.0)
    assert honest.claimed_mu == 1 / 1.5
    assert honest.passed
    halved = run_audit(1.5, 0.5)
    assert not halved.passed
    assert halved.low > halved.claimed_mu
    assert not run_audit(1.5, 3.0).passed


def test_the_interval_covers_as_often_as_it_says():
    random = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        _, low, high = mu_interval(random.normal(size=40), random.normal(0.8, 1, size=40), 0.9)
        held += low <= 0.8 <= high
    assert abs(held / 400 - 0.9) < 0.06


def test_audits_that_could_not_fail_are_refused():
    canary = {"w": torch.zeros(3)}
    with pytest.raises(PrivacyError, match="canary"):
        audit_step(lambda _: {"w": torch.zeros(3)}, canary, 1.0)
    with pytest.raises(PrivacyError, match="too few"):
        audit_step(lambda _: {"w": torch.zeros(3)}, {"w": torch.ones(3)}, 1.0, trials=3)

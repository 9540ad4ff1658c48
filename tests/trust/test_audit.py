"""The audit: its bounds are right on known mechanisms, it holds honest claims, and it catches what is planted."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from dpformer.privacy import Charge
from dpformer.privacy.noise import rounded_gaussian
from dpformer.trust.audit import suite as everything
from dpformer.trust.audit.bounds import claimed_mu, epsilon_of, epsilon_refuted, most_likely_tail, mu_refuted
from dpformer.trust.audit.controls import run_controls
from dpformer.trust.audit.membership import judge
from dpformer.trust.audit.one_run import audit_training
from dpformer.trust.audit.sampling import ByKeys, FixedSize, Shuffled, check_sampling
from dpformer.trust.audit.setting import embedded
from dpformer.trust.audit.steps import Canary, measure, power, trials_for
from tests.fit.conftest import quick_accounting  # noqa: F401


@pytest.fixture(scope="module")
def setting():
    return embedded(steps=6)


def guess(mu: float, canaries: int, guesses: int, seed: int) -> int:
    """Correct guesses on canaries whose scores are exactly mu apart: a known mu-GDP mechanism for each."""
    random = np.random.default_rng(seed)
    inside = random.random(canaries) < 0.5
    order = np.argsort(random.normal(size=canaries) + mu * inside)
    return int((~inside[order[: guesses // 2]]).sum() + inside[order[-guesses // 2 :]].sum())


def test_the_bounds_hold_for_known_mechanisms_and_are_not_empty():
    low = [mu_refuted(guess(1.5, 200, 40, seed), 40, 200) for seed in range(10)]
    assert sum(value > 1.5 for value in low) <= 2  # each is wrong once in twenty
    assert np.median(low) > 0.6
    strong = guess(6.0, 200, 40, 0)
    assert mu_refuted(strong, 40, 200) > 0.8
    assert mu_refuted(22, 40, 200) == 0  # no better than a coin


def test_the_epsilon_bound_is_the_binomial_one():
    refuted = epsilon_refuted(38, 40, 200, 1e-6)
    chance = binom.sf(37, 40, 1 / (1 + np.exp(-refuted))) + 200e-6
    assert chance == pytest.approx(0.05, rel=1e-6)
    assert epsilon_refuted(40, 40, 60000, 1e-6) == 0  # the delta term alone is above 5 %


def test_the_linear_program_agrees_with_independent_canaries():
    """Without abstention and with independent Gaussian scores, W is Binomial(k, Phi(mu/2)): never above the bound."""
    from scipy.stats import norm

    for mu, correct in [(0.5, 16), (1.5, 19)]:
        assert most_likely_tail(mu, correct, 20, 20) >= binom.sf(correct - 1, 20, norm.cdf(mu / 2)) - 1e-9


def test_the_claimed_mu_of_gaussians_is_their_own():
    assert claimed_mu((Charge("steps", 4.0, times=4), Charge("a", 2.0)), 1e-5) == pytest.approx(0.5**0.5, rel=0.01)
    assert epsilon_of(0.0, 1e-5) == 0


def test_sampling_that_is_not_poisson_is_caught():
    for seed in range(20):
        assert check_sampling(ByKeys(100, 0.2, seed).draw, 100, 0.2, 200).passed
    for kind in (FixedSize, Shuffled):
        assert not check_sampling(kind(100, 0.2, 1).draw, 100, 0.2, 200).passed
    sticky = ByKeys(100, 0.2, 1)
    twice = iter([batch for _ in range(100) for batch in [sticky.draw()] * 2])
    assert not check_sampling(
        lambda: next(twice), 100, 0.2, 200
    ).passed  # the same batch again: steps are not independent


@pytest.fixture(scope="module")
def sums():
    import torch

    random = torch.Generator().manual_seed(0)
    canary = torch.randn(40, generator=random)
    others = {"w": torch.randn(40, generator=random)}
    return Canary.of_floats(others, {"w": canary / canary.norm()}, bound=1.0)


def test_a_step_holds_its_claim_and_every_control_is_caught(sums):
    sigma = 0.8
    trials = trials_for(sigma)
    assert sums.size == pytest.approx(1, abs=1e-6)
    assert measure(sums, sigma, trials, seed=3).passed
    assert not measure(
        sums, sigma, trials, seed=3, noise=lambda key, shape, std: rounded_gaussian(key, shape, 0.7 * std)
    ).passed
    controls = run_controls(sums, sigma, trials, seed=1)
    assert [control.name for control in controls if not control.caught] == []
    assert {control.name for control in controls} >= {
        *("half the noise", "a duplicated user", "no cross term in the tied norm", "shuffled instead of Poisson"),
    }
    assert min(control.power for control in controls) > 0.999
    assert power(1.25, 1.25, trials) < 0.01  # without a defect the control is not "caught"


def test_membership_scores_are_judged():
    random = np.random.default_rng(0)

    class Statement:
        epsilon = 1.0
        attack = type("attack", (), {"advantage": 0.2})

    same = judge("x", Statement, random.normal(size=400), random.normal(size=400))
    assert same.passed
    assert same.auc_low < 0.5 < same.auc + 0.1
    found = judge("x", Statement, random.normal(size=400) + 2, random.normal(size=400))
    assert not found.passed
    assert found.auc > 0.9


def test_a_whole_training_holds_its_claim_and_too_little_noise_is_caught(setting, tmp_path):
    honest = audit_training(setting, tmp_path / "a", canaries=120, users=30)
    assert honest.passed
    tight = replace(setting, recipe=setting.recipe.changed({"epsilon": 0.5}))
    assert not audit_training(tight, tmp_path / "b", canaries=120, users=30, noise_scale=0.02).passed


def test_the_command_writes_a_report_and_fails_when_a_control_is_missed(dpformer, tmp_path, monkeypatch):
    from dpformer.trust import audit as package

    monkeypatch.setattr(package, "embedded", lambda seed: embedded(seed, steps=10))
    monkeypatch.setattr(everything, "LESS_NOISE", 0.02)
    done = dpformer("audit", "--canaries", 160, "--users", 60, "-o", tmp_path / "report", "--json")
    found = json.loads(done.out)
    assert found["step"]["passed"]
    assert found["one_run"]["passed"]
    assert {c["name"]: c["caught"] for c in found["controls"] if c["name"] != "no privacy at all"} == {
        "half the noise": True,
        "a duplicated user": True,
        "no cross term in the tied norm": True,
        "shuffled instead of Poisson": True,
        "a fixed batch size instead of Poisson": True,
        "a whole training with too little noise": True,
    }
    assert done.code == (0 if found["passed"] else 1)
    assert "<svg" in (tmp_path / "report" / "audit.svg").read_text()
    assert "## Negative controls" in (tmp_path / "report" / "audit.md").read_text()

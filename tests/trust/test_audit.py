"""The audit: its bounds are right on known mechanisms, sound fits hold, and what is planted is caught."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpformer.errors import DPFormerError
from dpformer.privacy import Charge, Curator
from dpformer.trust.audit import Setting, audit, of_preset
from dpformer.trust.audit import suite as parts
from dpformer.trust.audit.attacks import Float32Noise, GridNoise, possible
from dpformer.trust.audit.bounds import claimed_mu, epsilon_refuted, mu_refuted
from tests.trust import planted


def randomised_response(epsilon: float, delta: float, canaries: int, seed: int) -> int:
    """Right guesses of all coins where each is told with delta, else by a coin of bias e^eps / (1 + e^eps)."""
    random = np.random.default_rng(seed)
    told = random.random(canaries) < delta
    return int((told | (random.random(canaries) < 1 / (1 + np.exp(-epsilon)))).sum())


def test_the_bound_for_any_mechanism_holds_for_the_worst_one():
    low = [epsilon_refuted(randomised_response(1.0, 1e-3, 2000, s), 2000, 2000, 1e-3) for s in range(60)]
    assert sum(value > 1.0 for value in low) <= 8  # each is wrong once in twenty at the most
    assert np.median(low) > 0.85


def test_the_bound_for_any_mechanism_is_the_binomial_one_without_delta():
    refuted = epsilon_refuted(38, 40, 200, 0.0)
    assert binom.sf(37, 40, 1 / (1 + np.exp(-refuted))) == pytest.approx(0.05, rel=1e-6)
    assert epsilon_refuted(20, 40, 200, 1e-5) == 0
    assert epsilon_refuted(40, 40, 200, 0.5) == 0  # the delta of all canaries is above 5 %


def test_the_gaussian_bound_holds_for_gaussians_and_is_tight():
    random = np.random.default_rng(1)
    right = random.binomial(20_000, norm.cdf(0.45), size=50)
    low = [mu_refuted(int(one), 20_000) for one in right]
    assert max(low) < 0.9
    assert np.median(low) > 0.8
    assert mu_refuted(0, 10) == 0


def test_the_claimed_mu_of_gaussians_is_their_own():
    assert claimed_mu((Charge("steps", 4.0, times=4), Charge("a", 2.0)), 1e-5) == pytest.approx(0.5**0.5)
    sampled = claimed_mu((Charge("steps", 1.0, 0.5, 4),), 1e-5)
    assert 1.0 < sampled < 2.0  # four steps over everybody have mu = 2


def test_numbers_that_can_be_and_cannot():
    c, std = np.array([3.25]), 1.7
    for dtype in (np.float32, np.float64):
        seen = (c + std * float(np.float32(0.3))).astype(dtype)
        assert possible(seen, c, Float32Noise(std)).all()
        assert possible(np.array([3.5], dtype=dtype), c, GridNoise(0.125)).all()
    assert not possible(c + std * 0.3000000001, c, Float32Noise(std)).any()
    assert not possible(np.array([3.3]), c, GridNoise(0.125)).any()


def small(preset: str, epsilon: float = 4.0, fits: int = 2, canaries: int = 400) -> Setting:
    setting = of_preset(preset, epsilon, fits=fits)
    items = canaries if setting.kind != "walks" else 150
    return replace(
        setting, canaries=canaries, items=items, recipe=setting.recipe.changed({"dpsgd.batch_size": canaries // 2})
    )


@pytest.mark.parametrize("preset", ["distilled", "pure", "paper"])
def test_a_small_audit_holds_and_its_controls_are_caught(preset):
    found = audit(small(preset, canaries=400 if preset == "distilled" else 200, fits=4))
    likelihood, published, floating = found.attacks
    assert floating.verdict == "holds"
    assert published.verdict == "holds"
    assert published.control.mu > 1.5 * found.mu
    assert likelihood.verdict != "REFUTED"
    assert likelihood.found.mu > 0.3 * found.mu
    assert likelihood.control.mu > likelihood.found.mu
    assert floating.control.guesses > 0.9 * floating.control.canaries


DEFECTS = {
    "norms of 1.3": partial(planted.Asking, planted.Longer),
    "0.7 of the noise": planted.noise(planted.Scaled(0.7)),
    "no noise in one answer": planted.noise(planted.OnlyAnswer(1, planted.no_noise)),
    "twice and charged once": planted.Twice,
}


@pytest.mark.parametrize("name", ["sound", *DEFECTS])
def test_a_planted_defect_is_refuted_by_the_likelihood(name: str, tmp_path: Path):
    """The mu of a defect is 1.3 times the claim's or more."""
    setting = small("transitions", canaries=1500)
    heard = parts._play(setting, tmp_path, "fits", 3, DEFECTS.get(name, Curator))
    claim = claimed_mu(setting.recipe.plan(setting.canaries, False).charges(), 1e-5)
    found = parts._finding(heard.ratio, heard.inside, 1e-5)
    assert (found.mu > claim) == (name != "sound")


def test_an_attack_that_misses_its_defect_gives_no_verdict():
    nothing = parts._of(100, 50, 2, 1, 1e-5)
    seen = parts._of(20_000, 15_000, 200, 199, 1e-5)
    attack = parts.Attack("a", "b", "c", nothing, nothing, 1.0, 0.27)
    assert attack.verdict == "no verdict"
    assert replace(attack, control=seen).verdict == "holds"
    assert replace(attack, found=seen).verdict == "REFUTED"
    whole = parts.Audit("x", 1, 1, 1.0, 1e-5, 0.27, [attack])
    assert not whole.passed
    assert "not caught" in whole.problems[0]


def test_what_is_not_private_has_no_claim():
    with pytest.raises(DPFormerError, match="no claim"):
        of_preset("pure", float("inf"))
    with pytest.raises(DPFormerError, match="no preset"):
        of_preset("best")


def test_the_command_writes_a_report(dpformer, tmp_path):
    page = tmp_path / "audit.html"
    done = dpformer("audit", "--preset", "popularity", "--fits", 3, "-o", page, "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert found["passed"]
    assert {attack["verdict"] for attack in found["attacks"]} == {"holds"}
    text = page.read_text()
    assert "<svg" in text
    assert "What was not" in text
    assert "half of the noise" in text

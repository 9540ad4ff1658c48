"""Noise: its size, its independence, its state; and the audit that measures it from outside."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from dpformer.errors import PrivacyError
from dpformer.privacy.audit import audit_step, mu_interval
from dpformer.privacy.noise import NoiseSource, noise_source
from dpformer.privacy.plan import make_plan

SOURCES = [("system", None), ("crypto", None), ("seeded", 7)]
TINY = 1e-6
"""Chance of a false alarm, for each test that draws fresh noise."""


@pytest.fixture(params=SOURCES, ids=lambda pair: pair[0])
def source(request) -> NoiseSource:
    return noise_source(*request.param)


def test_a_ks_test_accepts_sigma_and_rejects_others(source):
    gradient = torch.zeros(40_000, dtype=torch.float64)
    source.add_noise_([("w", gradient)], 1.7)
    values = gradient.numpy()
    assert kstest(values, norm(0, 1.7).cdf).pvalue > TINY
    for wrong in (2 / 3, 3 / 2, 1 / 2):
        assert kstest(values, norm(0, 1.7 * wrong).cdf).pvalue < 1e-12


def test_noise_for_a_release_has_its_shape_and_std(source):
    drawn = source.gaussian((200, 200), 1.7)
    assert drawn.shape == (200, 200)
    assert drawn.dtype == np.float64
    assert kstest(drawn.ravel(), norm(0, 1.7).cdf).pvalue > TINY
    for std in (0.0, -1.0, math.nan):
        with pytest.raises(PrivacyError, match="is not above 0"):
            source.gaussian((2,), std)


def test_moments_and_tails(source):
    drawn = source.normal(400_000).astype(np.float64)
    n = len(drawn)
    assert abs(drawn.mean()) < 5 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / n)
    beyond = (np.abs(drawn) > 3.5).sum()
    expected = n * 2 * norm.sf(3.5)
    assert abs(beyond - expected) < 6 * math.sqrt(expected)


def test_noise_is_independent_across_parameters_and_steps(source):
    drawn = []
    for _ in range(3):
        gradients = {"a": torch.zeros(30_000), "b": torch.zeros(150, 200)}
        source.add_noise_(gradients.items(), 1.0)
        drawn += [gradient.reshape(-1).numpy() for gradient in gradients.values()]
    correlation = np.corrcoef(np.stack([*drawn, np.roll(drawn[0], 1), np.roll(drawn[0], 15_000)]))
    off = correlation[~np.eye(len(correlation), dtype=bool)]
    assert np.abs(off).max() < 5.5 / math.sqrt(30_000)


def test_squares_are_independent_too(source):
    """Values that share a Box-Muller radius in a wrong way would be uncorrelated, yet dependent."""
    drawn = source.normal(60_000).astype(np.float64).reshape(2, -1) ** 2
    assert abs(np.corrcoef(drawn)[0, 1]) < 5.5 / math.sqrt(30_000)
    assert abs(np.corrcoef(drawn[0][:-1], drawn[0][1:])[0, 1]) < 5.5 / math.sqrt(30_000)


def test_order_of_parameters_does_not_matter_to_a_seeded_run():
    first = {"a": torch.zeros(5), "b": torch.zeros(3, 2)}
    second = {"b": torch.zeros(3, 2), "a": torch.zeros(5)}
    noise_source("seeded", 3).add_noise_(first.items(), 1.0)
    noise_source("seeded", 3).add_noise_(second.items(), 1.0)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_noise_is_added_not_put_in_place(source):
    state = json.loads(json.dumps(source.state()))
    zero, five = torch.zeros(10, dtype=torch.float64), torch.full((10,), 5.0, dtype=torch.float64)
    source.add_noise_([("w", zero)], 2.0)
    source.restore(state)
    source.add_noise_([("w", five)], 2.0)
    torch.testing.assert_close(five - zero, torch.full((10,), 5.0, dtype=torch.float64))


def test_state_repeats_the_draws_bit_for_bit_in_json(source):
    source.normal(1001)  # an odd number: half-used words must be kept too
    state = json.loads(json.dumps(source.state()))
    first = [source.normal(k) for k in (1, 77, 1000)]
    source.restore(state)
    for expected, again in zip(first, [source.normal(k) for k in (1, 77, 1000)], strict=True):
        np.testing.assert_array_equal(expected, again)


def test_fresh_sources_differ():
    for mode in ("system", "crypto"):
        assert not np.array_equal(noise_source(mode).normal(8), noise_source(mode).normal(8))


def test_fresh_sources_differ_between_forked_looking_processes():
    code = "from dpformer.privacy.noise import noise_source; print(noise_source().normal(4).tolist())"
    outputs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(outputs) == 2


def test_a_seed_is_repeatable_and_insecure():
    np.testing.assert_array_equal(noise_source("seeded", 5).normal(9), noise_source("seeded", 5).normal(9))
    assert noise_source("seeded", 5).insecure
    assert not noise_source().insecure
    assert not noise_source("crypto").insecure


def test_torch_keeps_only_32_bits_of_a_seed():
    """Why torch's own CPU generator is not our source. When this fails, the docstring of `noise` is out of date."""
    first, second = (torch.randn(9, generator=torch.Generator().manual_seed(s)) for s in (1, 1 + 2**32))
    assert torch.equal(first, second)


def test_crypto_noise_is_the_published_cipher():
    """One value rebuilt by hand from RFC 8439 ChaCha20 key streams."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    source = noise_source("crypto")
    key = bytes.fromhex(source.state()["key"])
    value = source.normal(1)[0]
    total = 0.0
    for draw in range(4):
        nonce = bytes(4) + draw.to_bytes(12, "little")
        stream = Cipher(algorithms.ChaCha20(key, nonce), None).encryptor().update(bytes(16))
        u, v = (((int.from_bytes(stream[i : i + 8], "little") >> 11) + 1) / 2**53 for i in (0, 8))
        total += math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
    assert value == pytest.approx(total / 2, rel=1e-12)


def test_zero_gradient_training_moves_weights_as_predicted():
    """T steps of SGD on a zero gradient: each weight ends at N(0, T (lr sigma C / B)^2)."""
    plan = make_plan(1000, 5, 1e-4, 200, steps=25)
    clip, rate, source = 0.5, 0.1, noise_source()
    weight = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = torch.optim.SGD([weight], lr=rate)
    for _ in range(plan.steps):
        weight.grad = torch.zeros_like(weight)
        source.add_noise_([("weight", weight.grad)], plan.noise_std(clip))
        weight.grad /= plan.batch_size
        optimizer.step()
    expected = math.sqrt(plan.steps) * rate * plan.noise_multiplier * clip / plan.batch_size
    moved = weight.detach().double().numpy()
    assert kstest(moved, norm(0, expected).cdf).pvalue > TINY
    assert kstest(moved, norm(0, expected / 2).cdf).pvalue < 1e-12


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: noise_source("dice"), "'dice'"),
        (lambda: noise_source("seeded"), "seed"),
        (lambda: noise_source("system", 3), "seed"),
        (lambda: noise_source().add_noise_([("w", torch.zeros(2))], 0.0), "std 0"),
        (lambda: noise_source().add_noise_([("w", torch.zeros(2))], math.nan), "std nan"),
        (lambda: noise_source().add_noise_([("w", torch.tensor([1.0, math.inf]))], 1.0), "'w' is not finite"),
        (lambda: noise_source().add_noise_([("w", torch.zeros(2))] * 2, 1.0), "listed twice"),
        (lambda: noise_source("crypto").restore(noise_source().state()), "mode 'system'"),
    ],
)
def test_misuse_is_refused(call, word):
    with pytest.raises(PrivacyError, match=word):
        call()


def test_one_tensor_under_two_names_is_refused():
    tied = torch.zeros(4)
    with pytest.raises(PrivacyError, match="listed twice"):
        noise_source().add_noise_([("input", tied), ("output", tied.view(2, 2))], 1.0)
    noise_source().add_noise_([("empty", torch.zeros(0)), ("none", torch.zeros(0))], 1.0)


def test_a_bad_sum_leaves_every_gradient_alone():
    good, bad = torch.zeros(3), torch.tensor([math.nan])
    with pytest.raises(PrivacyError):
        noise_source().add_noise_([("a", good), ("b", bad)], 1.0)
    assert torch.equal(good, torch.zeros(3))


# --- the audit ------------------------------------------------------------------------------------------------------


def run_audit(mode: str, sigma: float, factor: float, clip: float = 0.5):
    """Audit the real source; `factor` is the planted defect."""
    torch.manual_seed(0)
    canary = {"w": torch.randn(20, 3), "b": torch.randn(7)}
    size = math.sqrt(sum(float(v.square().sum()) for v in canary.values()))
    canary = {name: value * clip / size for name, value in canary.items()}
    others = {name: torch.randn_like(value) for name, value in canary.items()}
    source = noise_source(mode)

    def noisy_sum(with_canary: bool) -> dict[str, torch.Tensor]:
        total = {name: others[name] + canary[name] * with_canary for name in canary}
        source.add_noise_(total.items(), sigma * clip * factor)
        return total

    return audit_step(noisy_sum, canary, sigma, trials=1500, confidence=1 - TINY)


@pytest.mark.parametrize("mode", ["system", "crypto"])
def test_a_single_step_audit_holds_the_claim_and_catches_half_the_noise(mode):
    honest = run_audit(mode, 1.5, 1.0)
    assert honest.claimed_mu == 1 / 1.5
    assert honest.passed
    halved = run_audit(mode, 1.5, 0.5)
    assert not halved.passed
    assert halved.low > halved.claimed_mu
    assert not run_audit(mode, 1.5, 3.0).passed


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

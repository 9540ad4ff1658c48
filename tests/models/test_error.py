"""Every propagation rule against sampling. Tolerances are about four standard errors of the sampled variance."""

import math

import pytest
import torch
from torch.nn import functional as F

from dpformer.models import error, reattention

N = 200_000


pytestmark = pytest.mark.usefixtures("float64")


def test_linear():
    d_in, d_out, var_x, var_w = 24, 40, 0.3, 0.02
    x, W = torch.randn(d_in), torch.randn(d_out, d_in) / 5
    draws = 4000
    noisy = (W + var_w**0.5 * torch.randn(draws, d_out, d_in)) @ (x + var_x**0.5 * torch.randn(draws, d_in))[..., None]
    sampled = noisy[..., 0].var(0).mean()
    found = error.linear(torch.tensor(var_x), x, W, var_w)
    assert math.isclose(found, sampled, rel_tol=0.02)
    # The formula as printed in the paper, without the sum over inputs, is off by an order of magnitude.
    printed = var_x * var_w + var_x * W.square().mean() + var_w * x.square().mean()
    assert printed < 0.1 * sampled


def test_linear_for_several_heads_at_once():
    W, x, var = torch.randn(3, 1, 4, 6), torch.randn(2, 1, 5, 6), torch.rand(2, 1, 5)
    found = error.linear(var, x, W, 0.1)
    assert found.shape == (2, 3, 5)
    torch.testing.assert_close(found[:, 1], error.linear(var[:, 0], x[:, 0], W[1, 0], 0.1))


@pytest.mark.parametrize("mean", [-3.0, -0.5, 0.0, 0.7, 4.0])
@pytest.mark.parametrize("std", [0.01, 1.0, 3.0])
def test_relu(mean, std):
    sampled = F.relu(mean + std * torch.randn(N))
    m, var = error.relu_moments(torch.tensor(mean), torch.tensor(std**2))
    assert math.isclose(m, sampled.mean(), rel_tol=0.02, abs_tol=0.01 * std)
    assert math.isclose(var, sampled.var(), rel_tol=0.03, abs_tol=2e-3 * std**2)
    assert var >= 0


def test_relu_without_error():
    for dtype in (torch.float32, torch.float64):
        m, var = error.relu_moments(torch.tensor([-7.0, 0.0, 4.0], dtype=dtype), torch.zeros(3, dtype=dtype))
        assert m.tolist() == [0, 0, 4]
        assert var.tolist() == [0, 0, 0]


def test_relu_averages_over_features():
    x, var = torch.randn(2, 3, 50), torch.rand(2, 3)
    sampled = F.relu(x + var[..., None].sqrt() * torch.randn(20_000, 2, 3, 50)).var(0).mean(-1)
    torch.testing.assert_close(error.relu(var, x), sampled, rtol=0.02, atol=0)


def test_relu_rule_for_gelu_is_too_large_by_at_most_a_bit_more_than_a_third():
    x = torch.randn(100)
    for std in (0.01, 0.1, 1.0):
        sampled = F.gelu(x + std * torch.randn(20_000, 100)).var(0).mean()
        assert 0.7 < error.relu(torch.tensor(std**2), x) / sampled < 1.4


def test_layer_norm():
    d = 400
    x, weight, var = 2 * torch.randn(d) + 1, torch.rand(d) + 0.5, 0.05
    noisy = F.layer_norm(x + var**0.5 * torch.randn(3000, d), (d,), weight)
    assert math.isclose(error.layer_norm(torch.tensor(var), x, weight, 1e-5), noisy.var(0).mean(), rel_tol=0.05)


def test_attention_output():
    S, var = torch.rand(4, 6).softmax(-1), torch.rand(6)
    noisy = S @ (var.sqrt()[:, None] * torch.randn(20_000, 6, 8))
    torch.testing.assert_close(error.attention_output(var, S), noisy.var(0).mean(-1), rtol=0.03, atol=0)


def test_residual_variances_add():
    a, b = 0.3, 0.5
    assert math.isclose((a**0.5 * torch.randn(N) + b**0.5 * torch.randn(N)).var(), a + b, rel_tol=0.02)


def test_effective_error():
    var = error.effective_error(3.0, 1000.0, torch.tensor([1.0, 0.5, 1e-9]), scale=2.0)
    torch.testing.assert_close(var.sqrt(), torch.tensor([0.006, 0.012, 6e6]))


def bias_of_attention(d=16, L=50, std=2.0, draws=20_000):
    """Known keys with Gaussian noise, of which half have much: expected scores without, with, and with the literal correction."""
    q, keys = torch.randn(d), torch.randn(L, d) / 2
    var = torch.zeros(L)
    var[::2] = std**2 * d / q.square().sum()  # logit std: |q| sqrt(var) / sqrt(d) = std
    true = (keys @ q / d**0.5).softmax(0)
    noisy = (keys + var.sqrt()[:, None] * torch.randn(draws, L, d)) @ q / d**0.5
    left, right = reattention.penalty(q.expand(L, d), var, cap=None)
    corrected = (noisy - left[-1] * right).softmax(-1).mean(0)
    plain = noisy.softmax(-1).mean(0)
    literal = (noisy.softmax(-1) * torch.exp(-q.square().sum() / d * var / 2)).mean(0)
    return tuple((found - true).abs().sum() / 2 for found in (plain, corrected, literal)), plain[::2].sum() - true[
        ::2
    ].sum()


def test_the_claim_attention_leans_towards_noisy_tokens_and_the_correction_takes_it_out():
    (plain, corrected, literal), shift = bias_of_attention()
    assert shift > 0.2, "noisy tokens get more than their share"
    assert corrected < plain / 3
    assert literal > corrected
    # Control: without noise there is nothing to see.
    (plain, corrected, _), shift = bias_of_attention(std=0.0, draws=10)
    assert max(plain, corrected, abs(shift)) < 1e-12


def test_penalty_never_overflows_and_keeps_to_the_cap():
    for dtype in (torch.float32, torch.float64):
        var = error.effective_error(10.0, 1.0, torch.tensor([1e-9, 1.0, 0.5, 1e-9, 1e-3], dtype=dtype))
        q = 100 * torch.randn(5, 8, dtype=dtype)
        left, right = reattention.penalty(q, var, cap=5.0)
        rows = left[:, None] * right
        assert rows.isfinite().all()
        for i in range(5):
            assert rows[i, : i + 1].max() - rows[i, : i + 1].min() <= 5.0 * (1 + 1e-5)

"""examples/nano_dpformer.py against the library, against autograd one user at a time, and against planted defects."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from dpformer import PhantomClipping
from dpformer.privacy import make_plan

PATH = Path(__file__).parents[1] / "examples" / "nano_dpformer.py"
ITEMS, LENGTH, USERS = 30, 12, 9


@pytest.fixture
def nano():
    """A fresh module per test: some tests change its functions."""
    spec = importlib.util.spec_from_file_location("nano_dpformer", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(nano, dtype=torch.float64):
    """A model in which Re-Attention has an effect, and a batch with repeated items and all lengths from 2 up."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    p_items = torch.rand(ITEMS, generator=generator, dtype=dtype) * 0.2 + 0.01
    p_positions = torch.linspace(1.0, 0.3, LENGTH, dtype=dtype)
    model = nano.Transformer(2.0, 100.0, p_items, p_positions, d=8).to(dtype)
    s = torch.randint(0, ITEMS, (USERS, LENGTH + 1), generator=generator)
    s[:, 3] = s[:, 1]  # the same item twice in one sequence
    lengths = torch.arange(USERS) % LENGTH + 2
    return model, s, lengths


def alone(model, s, lengths):
    """Gradient norms [B], by one autograd pass per user."""
    found = []
    for i in range(len(s)):
        loss = model.losses(s[i : i + 1], lengths[i : i + 1])[0]
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm())
    return torch.stack(found)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_norms_and_clipped_sum_are_those_of_the_library(nano, dtype, rtol):
    model, s, lengths = make(nano, dtype)
    norms = nano.clip(model, s, lengths)
    own = gradient(model)
    model.zero_grad()
    theirs = PhantomClipping(model, max_norm=1.0, rule="automatic").backward(lambda: model.losses(s, lengths))
    torch.testing.assert_close(norms.double(), theirs.double(), rtol=rtol, atol=0)
    # The library divides by a norm that is larger by a relative 1e-6 or more, as room for rounding.
    torch.testing.assert_close(own, gradient(model), rtol=0, atol=1e-4)


def test_norms_are_those_of_autograd(nano):
    model, s, lengths = make(nano)
    torch.testing.assert_close(nano.clip(model, s, lengths), alone(model, s, lengths), rtol=1e-9, atol=0)


@pytest.mark.parametrize("defect", ["no cross term", "first term squared, as printed"])
def test_a_wrong_formula_is_found(nano, monkeypatch, defect):
    right = nano.phantom_terms

    def wrong(*inputs):
        first, second, cross = right(*inputs)
        return (first, second) if defect == "no cross term" else (first.square(), second, cross)

    model, s, lengths = make(nano)
    monkeypatch.setattr(nano, "phantom_terms", wrong)
    norms, expected = nano.clip(model, s, lengths), alone(model, s, lengths)
    assert float((norms / expected - 1).abs().max()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("C", [0.1, 1.0])
def test_no_user_adds_more_than_C(nano, dtype, C):
    model, s, lengths = make(nano, dtype)
    parts = []
    for i in range(USERS):
        norm = nano.clip(model, s[i : i + 1], lengths[i : i + 1], C)
        parts.append(gradient(model))
        assert parts[-1].norm() <= C
        torch.testing.assert_close(parts[-1].norm()[None], C * norm / (norm + 0.01))
    nano.clip(model, s, lengths, C)
    torch.testing.assert_close(gradient(model), sum(parts))


@pytest.mark.filterwarnings("ignore:var")  # torch warns of a variance of nothing
def test_an_empty_batch_adds_nothing(nano):
    model, s, lengths = make(nano)
    assert len(nano.clip(model, s[:0], lengths[:0])) == 0
    assert not gradient(model).any()


def test_padding_changes_nothing(nano):
    model, s, lengths = make(nano)
    before, beyond = nano.clip(model, s, lengths), torch.arange(LENGTH + 1) >= lengths[:, None]
    torch.testing.assert_close(nano.clip(model, s.masked_fill(beyond, 0), lengths), before)


@pytest.mark.parametrize(
    ("users", "batch_size", "steps", "epsilon", "share"),
    [(3000, 512, 150, 8.0, 0.03), (6000, 1024, 60, 2.0, 0.2)],
)
def test_epsilon_is_that_of_the_library(nano, users, batch_size, steps, epsilon, share):
    plan = make_plan(users, epsilon, 1e-5, batch_size=batch_size, steps=steps, shares={"counts": share})
    sigma_counts = plan.releases[0].noise_multiplier
    spent = nano.spent(plan.noise_multiplier, batch_size / users, steps, sigma_counts, 1e-5)
    assert spent == pytest.approx(plan.total.epsilon, rel=0.01)


def test_variances_are_those_of_samples(nano):
    # The paper's table for ReLU: 0.3408 for a standard normal input, and 3.40e-5 for a standard deviation of 0.01.
    var = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    expected = torch.tensor([0.3408, 3.408e-5], dtype=torch.float64)
    torch.testing.assert_close(
        nano.relu_variance(torch.zeros(2, 1, dtype=torch.float64), var), expected, rtol=1e-3, atol=0
    )
    # A linear layer, with noise of variance 0.3 on its input and 0.2 on its weights.
    torch.manual_seed(0)
    layer, x = nano.Linear(6, 5), torch.randn(1, 1, 6)
    layer.var_w = 0.2
    noisy_x = x[0] + 0.3**0.5 * torch.randn(100_000, 1, 6)
    noisy_w = layer.weight + 0.2**0.5 * torch.randn(100_000, 5, 6)
    sampled = (noisy_x * noisy_w).sum(2).var(0).mean().item()
    assert layer(x, torch.full((1, 1), 0.3))[1].item() == pytest.approx(sampled, rel=0.03)


def test_re_attention_lowers_noisy_keys_up_to_the_cap(nano):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 4, 8)
    plain = nano.re_attention(q, k, torch.ones(1, 4))  # the same variance everywhere changes nothing
    causal = torch.ones(4, 4).triu(1).bool()
    torch.testing.assert_close(plain, (q @ k.mT / 8**0.5).masked_fill(causal, -torch.inf).softmax(-1))

    def lowered(var):  # by how many nats key 1 falls behind key 0, for query 3
        S = nano.re_attention(q, k, torch.tensor([[0.0, var, 0.0, 0.0]]))[0, 3]
        return float((plain[0, 3, 1] / plain[0, 3, 0]).log() - (S[1] / S[0]).log())

    assert lowered(0.5) == pytest.approx(float(q[0, 3].square().sum()) / 8 * 0.5 / 2, rel=1e-4)
    assert lowered(1e6) == pytest.approx(5.0, rel=1e-3)


def test_a_short_run_beats_popularity(nano, capsys):
    nano.main(steps=30)
    out = capsys.readouterr().out
    model, popularity = map(float, re.search(r"NDCG@10 of the last item: (\S+), popularity (\S+) ", out).groups())
    assert model > 1.2 * popularity
    assert 7.9 < float(re.search(r"epsilon (\S+) at", out)[1]) <= 8.0

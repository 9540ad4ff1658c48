"""Norms and sums against one sample at a time, in float64, for every rule, pair of uses, route and edge of shape."""

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dpformer.clipping import PhantomClipping, TiedCrossEntropy
from dpformer.errors import ClippingError
from tests.clipping.models import Albert, Everything, Recurrent, Tied
from tests.clipping.oracle import assert_exact, flat, loop, weighted

TIES = ["functional-T", "functional-transpose", "functional-linear", "left", "rows", "module", "untied"]


pytestmark = pytest.mark.usefixtures("float64")


def losses(module, batch):
    return module.losses(*batch)


@pytest.mark.parametrize("rule", ["automatic", "flat"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("tie", TIES)
def test_every_way_to_tie(tie, reduction, rule):
    model = Tied(M=11, d=4, L=9, tie=tie, reduction=reduction)
    s = torch.randint(0, 11, (5, 7))
    s[1] = 3  # one item, over and over
    s[2, 2:] = 0  # padding
    s[3, 1:] = 0
    assert_exact(model, losses, s, rule=rule)


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 6),
    T=st.integers(1, 9),
    M=st.integers(2, 12),
    d=st.integers(1, 7),
    seed=st.integers(0, 2**31),
    tie=st.sampled_from(TIES),
)
def test_any_size(B, T, M, d, seed, tie):
    """Length 1, M < L, one item, B = T, d = 1, a batch of one: all of them."""
    torch.manual_seed(seed)
    model = Tied(M, d, L=9, tie=tie)
    assert_exact(model, losses, torch.randint(1 if M > 1 else 0, M, (B, T)), tolerance=1e-8)


@settings(max_examples=25, deadline=None)
@given(B=st.integers(1, 5), T=st.integers(1, 6), M=st.integers(2, 9), seed=st.integers(0, 2**31))
@pytest.mark.parametrize("kind", [Albert, Recurrent])
def test_shared_layers_and_recurrent_weights(kind, B, T, M, seed):
    torch.manual_seed(seed)
    assert_exact(kind(M, 4), losses, torch.randint(0, M, (B, T)), tolerance=1e-8)


@settings(max_examples=25, deadline=None)
@given(B=st.integers(1, 5), T=st.integers(1, 6), n=st.integers(2, 5), seed=st.integers(0, 2**31))
def test_one_parameter_in_every_form_at_once(B, T, n, seed):
    torch.manual_seed(seed)
    assert_exact(Everything(n), losses, torch.randint(0, n, (B, T)), tolerance=1e-7)


def test_loss_at_the_last_position_only():
    model = Tied(M=9, d=4, L=6)

    def last(module, batch):
        (s,) = batch
        return F.cross_entropy(module(s)[:, -1], s[:, 0], reduction="none")

    assert_exact(model, last, torch.randint(1, 9, (4, 6)))


def test_all_padding_gives_a_zero_gradient_and_norm():
    model = Tied(M=9, d=4, L=6)
    s = torch.randint(1, 9, (4, 6))
    s[2] = 0
    assert_exact(model, losses, s)


class Module(nn.Module):
    """A module around one function of its parameters."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def losses(self, *batch):
        return self.function(self, *batch).square().flatten(1).sum(1)


X = (4, 5, 3)
IDS = torch.tensor([[1, 1, 0, 4, 2]])
RULES = {
    "linear": lambda: (Module(lambda m, x: F.linear(x, m.w, m.b), w=torch.randn(2, 3), b=torch.randn(2)), X),
    "linear without bias": lambda: (Module(lambda m, x: F.linear(x, m.w), w=torch.randn(2, 3)), X),
    "linear on vectors": lambda: (Module(lambda m, x: F.linear(x, m.w, m.b), w=torch.randn(2, 3), b=torch.randn(2)), (4, 3)),
    "linear, four dimensions": lambda: (Module(lambda m, x: F.linear(x, m.w), w=torch.randn(2, 3)), (4, 2, 5, 3)),
    "linear, bias only": lambda: (Module(lambda m, x: F.linear(x, torch.ones(2, 3), m.b), b=torch.randn(2)), X),
    "linear, transposed": lambda: (Module(lambda m, x: F.linear(x, m.w.T), w=torch.randn(3, 2)), X),
    "linear, sliced": lambda: (Module(lambda m, x: F.linear(x, m.w[1:3]), w=torch.randn(4, 3)), X),
    "linear, no rows": lambda: (Module(lambda m, x: torch.cat([F.linear(x, m.w[:0]), x @ m.w], -1), w=torch.randn(3, 3)), X),
    "linear, no rows and nothing else": lambda: (Module(lambda m, x: F.linear(x, m.w[:0]), w=torch.randn(3, 3)), X),
    "a sum with no rows": lambda: (Module(lambda m, x: torch.cat([x[:, :0] + m.w[:0], x * m.w[0]], 1), w=torch.randn(5, 3)), X),
    "linear, columns": lambda: (Module(lambda m, x: F.linear(x, m.w[:, :3]), w=torch.randn(4, 5)), X),
    "linear, reshaped": lambda: (Module(lambda m, x: F.linear(x, m.w.view(2, 3)), w=torch.randn(6)), X),
    "matmul": lambda: (Module(lambda m, x: x @ m.w, w=torch.randn(3, 2)), X),
    "matmul with a vector": lambda: (Module(lambda m, x: x @ m.w, w=torch.randn(3)), X),
    "matmul from the left": lambda: (Module(lambda m, x: m.w @ x.transpose(1, 2), w=torch.randn(2, 3)), X),
    "mm": lambda: (Module(lambda m, x: torch.mm(x, m.w), w=torch.randn(3, 2)), (4, 3)),
    "addmm": lambda: (
        Module(lambda m, x: torch.addmm(m.b, x.view(-1, 3), m.w).view(len(x), 5, 2), w=torch.randn(3, 2), b=torch.randn(2)), X),
    "layer norm": lambda: (Module(lambda m, x: F.layer_norm(x, (3,), m.w, m.b), w=torch.randn(3), b=torch.randn(3)), X),
    "layer norm, two dimensions": lambda: (
        Module(lambda m, x: F.layer_norm(x, (5, 3), m.w, m.b), w=torch.randn(5, 3), b=torch.randn(5, 3)), X),
    "rms norm": lambda: (Module(lambda m, x: F.rms_norm(x, (3,), m.w), w=torch.randn(3)), X),
    "scale and bias": lambda: (Module(lambda m, x: x * m.w + m.b, w=torch.randn(3), b=torch.randn(3)), X),
    "reflected": lambda: (Module(lambda m, x: m.b - m.w * x, w=torch.randn(3), b=torch.randn(3)), X),
    "minus": lambda: (Module(lambda m, x: x - m.b, b=torch.randn(5, 3)), X),
    "in place": lambda: (Module(lambda m, x: (x * 1).add_(m.b).mul_(m.w), w=torch.randn(3), b=torch.randn(3)), X),
    "a scalar": lambda: (Module(lambda m, x: x * m.w, w=torch.randn(())), X),
    "broadcast over features": lambda: (Module(lambda m, x: x * m.w, w=torch.randn(5, 1)), X),
    "positions, sliced": lambda: (Module(lambda m, x: x + m.p[: x.shape[1]], p=torch.randn(9, 3)), X),
    "positions, whole": lambda: (Module(lambda m, x: x + m.p, p=torch.randn(5, 3)), X),
    "positions, with a leading 1": lambda: (Module(lambda m, x: x + m.p[:, : x.shape[1]], p=torch.randn(1, 9, 3)), X),
    "positions, unsqueezed": lambda: (Module(lambda m, x: x + m.p[: x.shape[1]].unsqueeze(0), p=torch.randn(9, 3)), X),
    "positions by [1, L] ids": lambda: (
        Module(lambda m, x: x + F.embedding(torch.arange(x.shape[1])[None], m.p), p=torch.randn(9, 3)), X),
    "positions by [L] ids": lambda: (Module(lambda m, x: x + m.p[torch.arange(x.shape[1])], p=torch.randn(9, 3)), X),
    "positions by [B, L] ids": lambda: (
        Module(lambda m, x: x + m.p[torch.arange(x.shape[1]).expand(len(x), -1)], p=torch.randn(9, 3)), X),
    "positions through dropout": lambda: (
        Module(lambda m, x: x + F.dropout(m.p[torch.arange(x.shape[1]).expand(len(x), -1)], 0.0), p=torch.randn(9, 3)), X),
    "a class token": lambda: (
        Module(lambda m, x: torch.cat([m.c.expand(len(x), -1, -1), x], 1).cumsum(1), c=torch.randn(1, 1, 3)), X),
    "relative positions": lambda: (
        Module(lambda m, x: x @ x.transpose(1, 2) + m.p[(torch.arange(5)[:, None] - torch.arange(5)).abs()].permute(2, 0, 1)[0],
               p=torch.randn(9, 1)), X),
    "transposed, broadcast": lambda: (
        Module(lambda m, x: x[..., None, :] * m.w.T + (x @ m.w)[..., None, :], w=torch.randn(3, 3)), X),
    "transposed, whole and as a bias": lambda: (
        Module(lambda m, x: x[..., None, :] + m.w.T + m.w + F.linear(x, torch.eye(3), m.w.T[0])[..., None, :],
               w=torch.randn(3, 3)), X),
    "rows, transposed": lambda: (Module(lambda m, x: x @ m.w[1:].T + x[..., :1] * m.w[0, 0], w=torch.randn(4, 3)), X),
    "permuted": lambda: (Module(lambda m, x: x @ m.w.permute(1, 0), w=torch.randn(4, 3)), X),
    "keywords": lambda: (
        Module(lambda m, x: torch.matmul(input=x, other=m.w) + m.w.unsqueeze(dim=0)[:, :1], w=torch.randn(3, 3)), X),
    "padding kept in a part": lambda: (
        Module(lambda m, x: x[..., :2] + F.embedding((x[..., 0] > 0).long(), m.p, 0)[..., :2], p=torch.randn(4, 3)), X),
    "negative ids": lambda: (Module(lambda m, x: x + m.p[torch.arange(-5, 0)], p=torch.randn(9, 3)), X),
    "[1, L] ids from outside": lambda: (Module(lambda m, x: x + F.embedding(IDS, m.p), p=torch.randn(9, 3)), X),
    "index_select": lambda: (Module(lambda m, x: x + m.p.index_select(0, torch.tensor([1, 1, 0, 4, 2])), p=torch.randn(9, 3)), X),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    module, shape = RULES[name]()
    assert_exact(module, losses, torch.randn(shape))


@pytest.mark.parametrize("name", [name for name in RULES if "four" not in name])
def test_rule_when_batch_length_and_width_are_equal(name):
    """Where sizes coincide, a dimension could be taken for another."""
    torch.manual_seed(1)
    module, shape = RULES[name]()
    assert_exact(module, losses, torch.randn(3, *shape[1:]))
    assert_exact(RULES[name]()[0], losses, torch.randn(5, *shape[1:]))


def fuzzed(rng, p, x):
    """A random chain of views of a parameter, then a random use of it."""
    v = p
    for _ in range(rng.randint(0, 4)):
        d = v.dim()
        moves = {
            "reshape": lambda v: v.reshape(-1),
            "unsqueeze": lambda v, d=d: v.unsqueeze(rng.randint(-d - 1, d)),
            "none": lambda v: v[None],
            "squeeze": lambda v: v.squeeze(),
            "clone": lambda v: v.clone(),
            "expand": lambda v: v.expand(len(x), *v.shape),
        }
        if d:
            moves |= {
                "slice": lambda v: v[rng.randint(0, 1) :],
                "step": lambda v: v[::2],
                "last": lambda v: v[-1],
                "ellipsis": lambda v: v[..., :2],
                "ids": lambda v: v[torch.tensor([0, 0, v.shape[0] - 1])],
            }
        if d > 1:
            moves |= {
                "transpose": lambda v, d=d: v.transpose(rng.randint(-d, d - 1), rng.randint(-d, d - 1)),
                "permute": lambda v, d=d: v.permute(*rng.sample(range(d), d)),
                "flatten": lambda v: v.flatten(0, 1),
            }
        v = moves[rng.choice(sorted(moves))](v)
    uses = {
        "add": lambda: x + v,
        "multiply": lambda: v * x,
        "subtract": lambda: v - x,
        "linear": lambda: F.linear(x, v),
        "matmul": lambda: x @ v,
        "left": lambda: v @ x,
        "norm": lambda: F.layer_norm(x, x.shape[-v.dim() :] if v.dim() else x.shape[-1:], v),
        "other": lambda: torch.tanh(v) + x,
    }
    return uses[rng.choice(sorted(uses))]()


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(3,), (3, 3), (2, 3), (3, 2), (1, 3), (1, 3, 3), (3, 3, 3), ()]),
    batch=st.sampled_from([(1, 3, 3), (2, 3), (3, 3), (3, 3, 3), (4, 2, 3), (3, 1, 3)]),
    uses=st.integers(1, 3),
)
def test_any_chain_of_views_is_exact_or_refused(seed, shape, batch, uses):
    torch.manual_seed(seed)
    x = torch.randn(batch)

    def losses(m, given):
        (x,) = given
        rng, total = random.Random(seed), 0
        for _ in range(uses):
            y = fuzzed(rng, m.p, x)
            assert y.shape[0] == len(x)
            total = total + y.reshape(len(x), -1).square().sum(1)
        return total

    module = nn.ParameterDict({"p": torch.randn(shape)})
    module.p = module["p"]
    try:
        apart = torch.cat([losses(module, (x[i : i + 1],)) for i in range(len(x))])
        batched = losses(module, (x,))
    except (RuntimeError, IndexError, AssertionError, ValueError, TypeError):
        return  # no model at all
    if not torch.allclose(apart, batched):
        return  # mixes samples: another test
    try:
        assert_exact(module, losses, x, tolerance=1e-8)
    except ClippingError:
        return


def test_nothing_of_a_pass_is_left_to_the_garbage_collector():
    """A circle of references would keep each micro-batch's memory until the collector comes."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 1))
    clipping, seen = PhantomClipping(layers), []

    def losses():
        x = torch.randn(4, 5, 3)
        for layer in layers:
            x = layer(x)
            seen.append(weakref.ref(x))
        return x.sum((1, 2))

    nothing_left(lambda: clipping.backward(losses), seen)


@pytest.mark.parametrize("clipped", [True, False])
def test_nothing_of_a_head_is_left_to_the_garbage_collector(clipped):
    table, head, seen = nn.Embedding(9, 4), TiedCrossEntropy(), []
    clipping = PhantomClipping(table)

    def losses():
        s, w = torch.randint(0, 9, (3, 5)), torch.rand(3, 5)
        h = table(s).tanh()
        seen.append(weakref.ref(h))
        return head(h, table.weight, s, w)

    nothing_left(lambda: clipping.backward(losses) if clipped else losses().sum().backward(), seen)


def nothing_left(step, seen):
    step()  # what is done once only
    seen.clear()
    gc.collect()
    gc.disable()
    try:
        step()
        assert seen
        assert [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()


@pytest.mark.parametrize("tie", ["module", "untied"])
@pytest.mark.parametrize("route", ["gram", "formed", None])
def test_factors_of_parameters_are_in_norms_and_sums(tie, route):
    """Against one sample at a time, with its gradients multiplied before the norm is taken."""
    model = Tied(M=11, d=4, L=9, tie=tie)
    s = torch.randint(0, 11, (5, 7))
    names = [name for name, _ in model.named_parameters()]
    scales = {name: 0.5 + k for k, name in enumerate(names) if k % 3}
    _, gradients = loop(model, losses, (s,))
    scaled = [{n: scales.get(n, 1.0) * g for n, g in one.items()} for one in gradients]
    norms = torch.stack([sum(g.square().sum() for g in one.values()).sqrt() for one in scaled])
    expected = weighted(scaled, flat(norms))
    clipping = PhantomClipping(model, rule="flat", route=route, scales=scales)
    for _ in range(2):  # what is used once is derived early from the second batch on
        model.zero_grad()
        torch.testing.assert_close(clipping.backward(lambda: model.losses(s)), norms, rtol=1e-9, atol=1e-12)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=3e-6, atol=1e-12)


def test_a_factor_for_an_unknown_parameter_and_for_the_table_of_the_head_is_refused():
    with pytest.raises(ClippingError, match="no trainable parameter"):
        PhantomClipping(nn.Linear(2, 1), scales={"weigth": 0.5})
    table, head = nn.Embedding(5, 3), TiedCrossEntropy()
    s, w = torch.tensor([[1, 2]]), torch.ones(1, 2)
    clipping = PhantomClipping(table, scales={"weight": 0.5})
    with pytest.raises(ClippingError, match="scale the others"):
        clipping.backward(lambda: head(table(s), table.weight, s, w))

"""The tiled catalogue head: equal to torch's cross-entropy, exact under clipping, and small."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dpformer import PhantomClipping, TiedCrossEntropy
from dpformer.clipping import tiles
from dpformer.errors import ClippingError
from tests.clipping.oracle import assert_exact

pytestmark = pytest.mark.usefixtures("float64")


class Model(nn.Module):
    """A shared table with something between its two uses; `plain` is the same loss written with torch's own."""

    def __init__(self, M, d, tied=True, bias=False, plain=False):
        super().__init__()
        self.table = nn.Embedding(M, d, padding_idx=0)
        self.out = self.table if tied else nn.Embedding(M, d)
        self.mix = nn.Linear(d, d)
        self.head = TiedCrossEntropy()
        self.register_buffer("bias", torch.randn(M) if bias else None)
        self.plain = plain

    def losses(self, s, y, w):
        h = torch.tanh(self.mix(self.table(s))).cumsum(1)
        if self.plain:
            z = h @ self.out.weight.T + (0 if self.bias is None else self.bias)
            return (F.cross_entropy(z.transpose(1, 2), y, reduction="none") * w).sum(1)
        return self.head(h, self.out.weight, y, w, self.bias)


def plain_losses(module, batch):
    """For the loop: torch's own cross-entropy; under the recorder: the tiled head."""
    module.plain = len(batch[0]) == 1 and not torch.overrides._len_torch_function_stack()
    return module.losses(*batch)


def batch(B, T, M, ragged=True):
    s, y, w = torch.randint(0, M, (B, T)), torch.randint(0, M, (B, T)), torch.rand(B, T)
    if ragged:
        w = w * (torch.arange(T) < torch.randint(0, T + 1, (B, 1)))
    return s, y, w


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 7),
    T=st.integers(1, 9),
    M=st.integers(2, 15),
    d=st.integers(1, 6),
    tied=st.booleans(),
    bias=st.booleans(),
    tile=st.sampled_from([1, 3, 64]),
    hold=st.sampled_from([0, 2**20]),
    seed=st.integers(0, 2**31),
)
def test_exact_for_any_size_tile_and_hold(B, T, M, d, tied, bias, tile, hold, seed):
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_TOKENS", tile)
        patch.setattr(tiles, "GROUP_ELEMENTS", 1)
        patch.setattr(tiles, "HOLD_ELEMENTS", hold)
        assert_exact(Model(M, d, tied, bias), plain_losses, *batch(B, T, M), tolerance=1e-8)


@pytest.mark.parametrize("hold", [0, 2**20])
def test_plain_autograd_gives_the_same_as_torch(monkeypatch, hold):
    monkeypatch.setattr(tiles, "HOLD_ELEMENTS", hold)
    model = Model(9, 4, bias=True)
    data = batch(5, 6, 9)
    upstream = torch.rand(5)
    results = {}
    for plain in (True, False):
        model.plain = plain
        model.zero_grad()
        losses = model.losses(*data)
        (losses * upstream).sum().backward()
        results[plain] = [losses.detach(), *(p.grad.clone() for p in model.parameters())]
    for a, b in zip(results[True], results[False], strict=True):
        torch.testing.assert_close(a, b)


def test_a_head_with_other_uses_of_every_kind():
    """A bias table and a linear map through the same parameter: only the formed route can join them."""

    class Odd(Model):
        def losses(self, s, y, w):
            h = torch.tanh(F.linear(self.table(s), self.table.weight))
            h = h + self.table.weight[0] + self.table.weight[: s.shape[1]]
            if self.plain:
                return (F.cross_entropy((h @ self.table.weight.T).transpose(1, 2), y, reduction="none") * w).sum(1)
            return self.head(h, self.table.weight, y, w)

    model = Odd(5, 5)
    del model.mix
    assert_exact(model, plain_losses, *batch(4, 3, 5))


def test_an_item_taken_out_by_minus_infinity():
    model = Model(6, 3)
    model.bias = torch.zeros(6).index_fill(0, torch.tensor([0]), -torch.inf)
    s, y, w = batch(4, 5, 6)
    assert_exact(model, plain_losses, s, y.clamp_min(1), w)


ROUTES = [
    "gram",
    "formed",
]  # of samples with as many tokens as the table has columns, D is kept, or the gradient at the table


@pytest.mark.parametrize("route", ROUTES)
def test_two_forwards_before_a_backward_do_not_share_what_is_held(route):
    model = Model(9, 4)
    first, second = batch(3, 4, 9, ragged=False), batch(3, 4, 9, ragged=False)
    clipping = PhantomClipping(model, route=route)
    expected = clipping.norms(lambda: model.losses(*first))

    def interleaved():
        losses = model.losses(*first)
        with torch.no_grad():
            model.losses(*second)
        return losses

    torch.testing.assert_close(clipping.norms(interleaved), expected)


def test_losses_that_are_weighted_outside_the_head():
    factors = torch.tensor([0.0, 0.5, 1.0, -3.0, 7.0])

    def weighted(module, data):
        s, y, w, f = data
        return plain_losses(module, (s, y, w)) * f

    assert_exact(Model(9, 4), weighted, *batch(5, 6, 9), factors)


@pytest.mark.parametrize("route", ROUTES)
def test_measured_twice_is_measured_the_same(route):
    model = Model(9, 4)
    data = batch(4, 5, 9, ragged=False)
    clipping = PhantomClipping(model, route=route)
    first = clipping.norms(lambda: model.losses(*data))
    torch.testing.assert_close(clipping.backward(lambda: model.losses(*data)), first)
    torch.testing.assert_close(clipping.norms(lambda: model.losses(*data)), first)


@pytest.mark.parametrize("route", ROUTES)
def test_a_sample_that_is_not_finite_adds_nothing(route):
    model = Model(9, 4)
    s, y, w = batch(4, 5, 9, ragged=False)
    clipping = PhantomClipping(model, route=route)
    keep = torch.tensor([0, 1, 3])
    clipping.backward(lambda: model.losses(s[keep], y[keep], w[keep]))
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    broken = w.clone()
    broken[2, 0] = torch.inf
    norms = clipping.backward(lambda: model.losses(s, y, broken))
    assert norms.isfinite().tolist() == [True, True, False, True]
    assert clipping.nonfinite == 1
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e)


def test_refusals():
    model, (s, y, w) = Model(9, 4), batch(4, 5, 9)
    with pytest.raises(ClippingError, match="called twice"):
        PhantomClipping(model).norms(lambda: model.losses(s, y, w) + model.losses(s, y, w))
    with pytest.raises(ClippingError, match="targets and weights"):
        model.head(torch.zeros(4, 5, 4), model.table.weight, y[:, :2], w)
    with pytest.raises(ClippingError, match="fixed"):
        model.head(torch.zeros(4, 5, 4), model.table.weight, y, w, torch.zeros(9, requires_grad=True))
    with pytest.raises(ClippingError, match="whole table"):
        PhantomClipping(model).norms(lambda: model.head(model.mix(model.table(s)), model.table.weight[1:], y - 1, w))
    with pytest.raises(ClippingError, match="whole table"):
        PhantomClipping(model).norms(lambda: model.head(model.mix(model.table(s)), 2 * model.table.weight, y, w))


@pytest.mark.parametrize("which", ["hidden", "weights"])
def test_what_is_changed_before_plain_autograd_comes_back_is_seen(which):
    table = torch.randn(7, 3, requires_grad=True)
    given = {"hidden": torch.randn(2, 4, 3), "weights": torch.ones(2, 4)}
    losses = TiedCrossEntropy()(given["hidden"], table, torch.randint(0, 7, (2, 4)), given["weights"])
    given[which].mul_(3)
    with pytest.raises(RuntimeError, match="inplace"):
        losses.sum().backward()

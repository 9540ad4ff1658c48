"""Uses that are derived in the backward pass itself, once their structure has been checked: nothing may be missing then."""

import pytest
import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from dpformer.clipping import PhantomClipping, register_rule
from dpformer.clipping.algebra import Outer
from dpformer.clipping.recorder import Use
from dpformer.errors import ClippingError
from dpformer.fit.workers import Worker
from dpformer.models import Transformer, TransformerSpec
from tests.clipping.oracle import assert_exact

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("T", [1, 9])  # gradients larger than their factors, and smaller
def test_what_is_used_once_is_derived_early_to_the_same_sums(T, monkeypatch):
    model = Transformer(TransformerSpec(items=10, max_length=9, d=4))
    s = torch.randint(1, 11, (5, T + 1))
    clipping, settled = PhantomClipping(model), []
    worker = Worker(model, clipping)
    settle = Use.settle

    def noted(use, route, gradient):
        settle(use, route, gradient)
        assert use.gradient is None
        settled.extend(view.name for view in use.views)

    monkeypatch.setattr(Use, "settle", noted)
    sums = []
    for time in range(2):
        model.zero_grad()
        clipping.backward(lambda: worker.losses(s))
        sums.append([p.grad.clone() for p in model.parameters()])
        assert bool(settled) == (time == 1)  # the first time samples are checked to be apart
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-6
        )  # float32 sums of five samples of norm 1, in another order
    assert sorted(settled) == sorted(name for name, _ in model.named_parameters() if name != "embedding.weight")


def test_an_input_changed_in_place_is_seen_early_too():
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    clipping, change = PhantomClipping(layers), [False, False, True]

    def losses():
        x = torch.randn(4, 5, 3)
        h = layers[0](x)
        out = layers[1](h)
        if change.pop(0):
            h.data.mul_(1)  # not seen by autograd
            x.mul_(2)
        return out.sum((1, 2))

    clipping.backward(losses)
    clipping.backward(losses)
    with pytest.raises(ClippingError, match="changed in place"):
        clipping.backward(losses)


def twice(x, y, weight):
    if has_torch_function((x, y, weight)):
        return handle_torch_function(twice, (x, y, weight), x, y, weight)
    return x @ weight.T + y @ weight.T


@register_rule(twice)
def rule(recorder, function, x, y, weight):
    view, value = recorder.view(weight), recorder.value(weight)

    def derive(gradient, samples, x, y):
        yield view, Outer(gradient, x)
        yield view, Outer(gradient, y)

    return recorder.record(function, x @ value.T + y @ value.T, [view], derive, saved=[x, y])


def test_two_forms_of_one_use_have_their_cross_term():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

    def losses(module, batch):
        return twice(*batch, module.weight).square().sum((1, 2))

    x = torch.randn(3, 20, 4)
    assert_exact(Twice(), losses, x, x.clone())


class Undone(torch.autograd.Function):
    """An activation that takes itself back in place on the way back."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(torch.where(x < 0, 0.1, 1.0))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        slope = torch.where(y < 0, 0.1, 1.0)
        y.div_(slope)
        return gradient * slope


def test_what_is_changed_after_it_was_derived_and_read_again_is_seen():
    first, second = nn.Linear(30, 30), nn.Linear(30, 30)  # at two times the factors are smaller: these are kept
    clipping = PhantomClipping(nn.Sequential(first, second))
    x = torch.randn(1, 2, 30)
    with pytest.raises(ClippingError, match="changed in place"):
        clipping.backward(lambda: second(Undone.apply(first(x).clone())).square().sum((1, 2)))


@pytest.mark.parametrize("route", ["gram", "formed", None])
def test_all_of_it_under_autocast(route):
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).float()
    x, clipping = torch.randn(5, 40, 8, dtype=torch.float32), PhantomClipping(module, route=route)
    exact = clipping.norms(lambda: module(x).square().sum((1, 2)))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            norms = clipping.backward(lambda: module(x).float().square().sum((1, 2)))
        torch.testing.assert_close(norms, exact, rtol=0.02, atol=0)


@pytest.mark.parametrize("shape", [(0, 5), (0, 2)])
def test_an_empty_batch_of_the_transformer(shape):
    model = Transformer(TransformerSpec(items=10, max_length=6, d=8))
    clipping = PhantomClipping(model)
    worker = Worker(model, clipping)
    assert clipping.backward(lambda: worker.losses(torch.zeros(shape, dtype=torch.int64))).shape == (0,)
    assert not any(p.grad.any() for p in model.parameters())

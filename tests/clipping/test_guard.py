"""Whatever the recorder does not understand raises, with the parameter's name; nothing is ever silently wrong."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpformer import PhantomClipping
from dpformer.clipping import Dense, register_rule
from dpformer.clipping import algebra as forms
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import RULES
from dpformer.errors import ClippingError
from tests.clipping.models import Tied
from tests.clipping.oracle import assert_exact, loop


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def refuses(module, function, match, B=4):
    x = torch.randn(B, 5, 3)
    for p in module.parameters():
        p.grad = None
    with pytest.raises(ClippingError, match=match):
        PhantomClipping(module).backward(lambda: function(module, x))
    assert all(p.grad is None or not p.grad.any() for p in module.parameters()), "something was released"


def linear():
    return nn.Linear(3, 3)


def sums(y):
    return y.flatten(1).square().sum(1)


REFUSED = {
    "distances to a parameter": (
        lambda: nn.ParameterDict({"p": torch.zeros(4, 3)}),
        lambda m, x: torch.cdist(x, m["p"]).sum((1, 2)),
        "'p'.*cdist",
    ),
    "a sparse table": (lambda: nn.Embedding(5, 3, sparse=True), lambda m, x: sums(m(x.long().abs()[..., 0])), "sparse"),
    "a parameter written into": (linear, lambda m, x: sums(x @ (m.weight + 1).mul_(2).T + m.bias), "'weight.*writes into it"),
    "max_norm": (lambda: nn.Embedding(5, 3, max_norm=1.0), lambda m, x: sums(m(x.long().abs()[..., 0])), "max_norm"),
    "losses without the parameters": (linear, lambda m, x: sums(m(x)).detach(), "do not depend"),
    "one loss for the batch": (linear, lambda m, x: sums(m(x)).mean(), "one loss per sample"),
    "batch norm of its own": (
        lambda: nn.Sequential(linear(), nn.Flatten(1), nn.BatchNorm1d(15)),
        lambda m, x: sums(m(x)),
        "'2.weight'.*batch_norm",
    ),
    "batch norm without parameters": (linear, lambda m, x: sums(F.batch_norm(m(x), None, None, training=True)), "batch_norm"),
    "in-batch negatives": (
        linear,
        lambda m, x: F.cross_entropy(m(x)[:, 0] @ x[:, 1].T * m(x)[:, 0].sum(1), torch.arange(len(x)), reduction="none"),
        "another",
    ),
    "packed by a mask": (linear, lambda m, x: m(x[x[..., 0] > 0]).sum() + sums(x), "does not hold|another"),
    "a tensor from outside": (linear, lambda m, x: sums(m(x) * torch.ones(3, requires_grad=True)), "no parameter of the module"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, function, match = REFUSED[name]
    refuses(make(), function, match)


def negatives(m, x, weight):
    """In-batch negatives by a function whose weight is made of the samples."""
    q = m(x)[:, :1]  # [B, 1, 3]
    return weight(q)


SAMPLES_AS_WEIGHTS = {
    "convolution": lambda q: F.conv1d(q, q),
    "bias of a convolution": lambda q: F.conv1d(q, torch.ones(4, 1, 3), q.sum((1, 2))),
    "layer norm": lambda q: F.layer_norm(q.expand(4, 4, 3).transpose(1, 2), (4,), q.sum((1, 2))),
    "group norm": lambda q: F.group_norm(q.expand(4, 4, 3), 2, q.sum((1, 2))),
}


@pytest.mark.parametrize("name", SAMPLES_AS_WEIGHTS)
@pytest.mark.parametrize("late", [False, True])
def test_weights_made_of_samples_are_refused_in_their_batch(name, late):
    """Also when it begins after batches that were sound, and where the gradient is 0 in the first."""
    module, x = linear(), torch.randn(4, 5, 3)
    clipping = PhantomClipping(module)
    if late:
        clipping.backward(lambda: sums(module(x)))
    with pytest.raises(ClippingError):
        clipping.backward(lambda: sums(module(x)) + 1e-3 * sums(negatives(module, x, SAMPLES_AS_WEIGHTS[name])))


class Double(torch.autograd.Function):
    """A function that the recorder cannot see: it takes the parameter straight into autograd."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g @ w.T, 2 * x.flatten(0, 1).T @ g.flatten(0, 1)


def test_a_custom_autograd_function_is_caught_in_the_graph():
    refuses(linear(), lambda m, x: sums(m(x)) + sums(Double.apply(x, m.weight)), "'weight'.*DoubleBackward")


class Smuggled(torch.autograd.Function):
    """The worst: a backward that writes a parameter's gradient by itself."""

    @staticmethod
    def forward(ctx, x, box):
        ctx.box = box
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            torch.autograd.backward(ctx.box[0].square().sum())
        return g, None


def test_a_gradient_written_during_the_backward_is_caught():
    module = linear()
    x = torch.randn(4, 5, 3)
    with pytest.raises(ClippingError, match="past the recorder"):
        PhantomClipping(module).backward(lambda: sums(Smuggled.apply(module(x), [module.weight])))
    assert module.weight.grad is None


def test_a_backward_pass_inside_the_model_leaves_nothing_behind():
    """Adversarial perturbations take a gradient of their own before the loss."""

    class Perturbed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.mix = nn.Embedding(9, 3), linear()

        def losses(self, s):
            e = self.embedding(s)
            (r,) = torch.autograd.grad(sums(self.mix(e).tanh()).sum(), e, retain_graph=True)
            return sums(self.mix(e + 0.1 * r.sign()).tanh())

    model = Perturbed().double()
    clipping = PhantomClipping(model)
    for _ in range(2):
        s = torch.randint(0, 9, (4, 5))
        norms, _ = loop(model, lambda m, batch: m.losses(*batch), (s,))
        torch.testing.assert_close(clipping.norms(lambda s=s: model.losses(s)), norms)


def test_a_backward_call_inside_the_model_is_caught():
    m, x = linear(), torch.randn(4, 5, 3)

    def losses():
        Double.apply(x, m.weight).sum().backward()
        return sums(m(x))

    with pytest.raises(ClippingError, match="past the recorder"):
        PhantomClipping(m).backward(losses)
    assert m.weight.grad is None


def test_second_derivatives_are_refused():
    m, x = linear(), torch.randn(4, 3, requires_grad=False)

    def losses():
        z = m(x)
        (g,) = torch.autograd.grad(z.tanh().sum(), z, create_graph=True)
        return sums(z) + sums(g)

    def through_a_use():
        y = m(x)
        z = m(y).tanh()
        (g,) = torch.autograd.grad(z.sum(), y, create_graph=True)
        return sums(z) + sums(g)

    with pytest.raises(ClippingError, match="second derivatives"):
        PhantomClipping(m).norms(through_a_use)
    PhantomClipping(m).norms(losses)  # does not pass a use twice: fine


def test_inputs_changed_after_their_use_are_refused():
    m = linear()

    x = torch.ones(4, 3)

    def losses():
        y = m(x)
        x.zero_()
        return sums(y)

    with pytest.raises(ClippingError, match="changed in place"):
        PhantomClipping(m).norms(losses)


def test_statements_in_place_write_in_place():
    module = nn.ParameterDict({"b": torch.rand(3, dtype=torch.float64) + 0.5})

    def losses(m, batch):
        y = batch[0] * 1.0
        y.mul_(m["b"])
        y += m["b"]
        return sums(y + m["b"])

    assert_exact(module, losses, torch.randn(4, 5, 3, dtype=torch.float64))


def test_gradient_hooks_on_parameters_are_refused():
    m = linear()
    m.weight.register_hook(lambda g: 3 * g)
    with pytest.raises(ClippingError, match="hook"):
        PhantomClipping(m)


def test_low_precision_after_construction_is_refused():
    m = linear()
    clipping = PhantomClipping(m)
    m.bfloat16()
    with pytest.raises(ClippingError, match="bfloat16"):
        clipping.backward(lambda: sums(m(torch.randn(2, 3))))


def test_parameters_that_are_not_contiguous():
    module = nn.ParameterDict({"w": nn.Parameter(torch.randn(5, 3, dtype=torch.float64).T)})
    assert_exact(module, lambda m, batch: sums(batch[0] @ m["w"]), torch.randn(4, 2, 3, dtype=torch.float64))


def test_frozen_parameters_cost_nothing_and_may_be_used_anyhow():
    module = nn.Sequential(linear(), nn.Flatten(), nn.LayerNorm(15), nn.Linear(15, 2))
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    recorder = Recorder(module)
    with recorder:
        out = module(torch.randn(4, 5, 3)) + module[0].weight.softmax(0).sum()
    assert [use.names for use in recorder.uses] == ["'2.weight'", "'3.weight', '3.bias'"]
    assert out.requires_grad

    def losses(m, batch):
        return sums(m(*batch) + m[0].weight.softmax(0).sum())

    assert_exact(module.double(), losses, torch.randn(4, 5, 3, dtype=torch.float64))


def test_detached_and_attribute_uses_are_no_uses():
    module = linear().double()

    def losses(m, batch):
        (x,) = batch
        scale = m.weight.detach().norm() + m.weight.data.mean() + m.weight.shape[0] + m.weight.numel()
        with torch.no_grad():
            scale = scale + m.weight.square().sum()
        return sums(m(x) * scale + torch.zeros_like(m.bias) + (m.bias > 0))

    assert_exact(module, losses, torch.randn(4, 5, 3, dtype=torch.float64))


def test_low_precision_parameters_are_refused_and_autocast_keeps_the_bound():
    with pytest.raises(ClippingError, match=r"bfloat16.*autocast"):
        PhantomClipping(linear().bfloat16())
    model = Tied(M=30, d=8, L=12, tie="module")
    s = torch.randint(1, 30, (6, 12))
    exact = PhantomClipping(model).norms(lambda: model.losses(s))

    def losses():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.losses(s).float()

    for i in range(6):
        model.zero_grad()
        clipping = PhantomClipping(model, max_norm=0.5, rule="flat")
        one = s[i : i + 1]

        def alone(one=one):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model.losses(one).float()

        clipping.backward(alone)
        total = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
        assert total <= 0.5 * (1 + 1e-6)
    # bfloat16 has 8 bits: norms agree to a few percent with those of float32.
    torch.testing.assert_close(PhantomClipping(model).norms(losses), exact, rtol=0.05, atol=0)


def test_float16_is_not_supported():
    m, x = linear(), torch.randn(4, 5, 3)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ClippingError, match=r"float16.*bfloat16"):
        PhantomClipping(m).backward(lambda: sums(m(x).float()))


def test_a_parameter_as_whole_numbers_has_no_gradient():
    """A straight-through code would have to be written as such."""

    def losses(m, batch):
        (x,) = batch
        return sums(m(x) * m.bias.to(torch.int64) + m.weight.to(torch.int32).sum())

    assert_exact(linear().double(), losses, torch.randn(4, 5, 3, dtype=torch.float64))


def test_refusals_name_the_true_cause():
    m = linear()
    refuses(
        m, lambda m, x: sums(Double.apply(x, m.weight) + m.bias), "'weight' reaches the loss.*custom autograd.Function"
    )
    scripted = torch.jit.script(linear())
    refuses(scripted, lambda m, x: sums(m(x)), "'(weight|bias)' reaches the loss.*scripted")


def test_bad_arguments():
    with pytest.raises(ClippingError, match="max_norm"):
        PhantomClipping(linear(), max_norm=0)
    with pytest.raises(ClippingError, match="rule"):
        PhantomClipping(linear(), rule="ghost")
    m, x = linear(), torch.randn(4, 5, 3)
    with pytest.raises(ClippingError, match=r"weights have shape \(3,\)"):
        PhantomClipping(m).weighted_sum(lambda: sums(m(x)), torch.ones(3))


def test_users_own_rules():
    class Log(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.rand(3, dtype=torch.float64) + 1)

        def forward(self, x):
            return torch.xlogy(x, self.p)

    def losses(m, batch):
        return sums(m(*batch))

    x, module = torch.rand(4, 5, 3, dtype=torch.float64) + 0.5, Log()
    with pytest.raises(ClippingError, match=r"'p'.*xlogy"):
        PhantomClipping(module).norms(lambda: losses(module, (x,)))

    @register_rule(torch.xlogy)
    def times_log(recorder, function, x, p):
        view = recorder.view(p)
        output = torch.xlogy(x, recorder.value(p))

        def derive(gradient, samples, x):
            terms = gradient * x / view.value.detach()
            summed = terms.sum(1)
            yield view, Dense(summed[..., None], terms.norm(dim=2).sum(1))

        return recorder.record(function, output, [view], derive, saved=[x])

    try:
        assert_exact(module, losses, x)
    finally:
        del RULES[torch.xlogy]


def test_negative_control_without_the_cross_term(monkeypatch):
    """The check against the loop must fail for the classic mistake: the norms of both uses of a tie without their product."""
    whole = forms.inner

    def no_cross(a, b):
        return whole(a, b) if a is b else torch.zeros(len(a.bound()), dtype=torch.float64)

    monkeypatch.setattr("dpformer.clipping.gradient.inner", no_cross)
    model = Tied(M=11, d=4, L=9, tie="module").double()
    s = torch.randint(1, 11, (5, 7))
    with pytest.raises(AssertionError):
        assert_exact(model, lambda m, batch: m.losses(*batch), s)

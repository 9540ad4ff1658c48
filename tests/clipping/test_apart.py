"""Samples must stay apart, and first: what mixes or moves them is noticed, also when an earlier batch looked harmless."""

import pytest
import torch
from torch import nn

from dpformer import PhantomClipping
from dpformer.clipping import guard
from dpformer.errors import ClippingError
from tests.clipping.oracle import assert_exact
from tests.clipping.test_guard import linear, sums


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("B", [4, 5])
def test_samples_may_be_another_dimension_even_when_batch_and_length_are_equal(B):
    def losses(m, batch):
        return sums(m(batch[0].transpose(0, 1)).transpose(0, 1))

    assert_exact(linear().double(), losses, torch.randn(B, 5, 3, dtype=torch.float64))


def exact_for_each_loss(module, losses):
    """Norms and sums against autograd on each loss: for batches that cannot be cut into samples from outside."""
    clipping, parameters = PhantomClipping(module), list(module.parameters())
    for _ in range(2):  # the second time what is used once is derived early
        each = [torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True) for one in losses()]
        each = [[torch.zeros_like(p) if g is None else g for p, g in zip(parameters, one, strict=True)] for one in each]
        norms = torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in each])
        weights = torch.rand(len(each))
        module.zero_grad()
        torch.testing.assert_close(clipping.weighted_sum(losses, weights).float(), norms)
        for k, p in enumerate(parameters):
            torch.testing.assert_close(p.grad, sum(w * one[k] for w, one in zip(weights, each, strict=True)))


def test_tokens_packed_by_a_mask_and_added_up_again():
    m, x = nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(3), linear()), torch.randn(4, 5, 3)
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[0, :2] = mask[1, :3] = mask[3, 0] = True  # six tokens, of three of the four samples
    rows = mask.nonzero()[:, 0]
    exact_for_each_loss(m, lambda: torch.zeros(4).index_add(0, rows, sums(m(x[mask]))))
    shuffled = torch.tensor([3, 0, 5, 1, 4, 2])
    exact_for_each_loss(m, lambda: torch.zeros(4).index_add(0, rows[shuffled], sums(m(x[mask])[shuffled])))
    exact_for_each_loss(m, lambda: torch.zeros(4, 3).index_put((rows,), m(x[mask]), accumulate=True).square().sum(1))


def test_a_packed_token_that_two_samples_take_is_refused():
    m, x = linear(), torch.randn(6, 3)
    ids, rows = torch.tensor([0, 1, 2, 3, 4, 5, 2]), torch.tensor([0, 0, 1, 2, 2, 3, 3])
    with pytest.raises(ClippingError, match="does not hold"):
        PhantomClipping(m).norms(lambda: torch.zeros(4).index_add(0, rows, sums(m(x)[ids])))
    clipping = PhantomClipping(m)
    clipping.backward(lambda: sums(m(x[:4])))
    with pytest.raises(ClippingError, match="another"):
        clipping.backward(lambda: torch.zeros(4).index_add(0, rows, sums(m(torch.cat([x, x[:2]]))[ids])))


def second_batch(module, first, second, match="another"):
    """The first batch is harmless and leaves its structure checked; the second is not."""
    clipping = PhantomClipping(module)
    clipping.backward(first)
    with pytest.raises(ClippingError, match=match):
        clipping.backward(second)


def passes(module, batches):
    """How many backward passes from the losses each batch takes. (A function of parameters alone has its own graph.)"""
    clipping, counts, grad = PhantomClipping(module), [], torch.autograd.grad

    def counted(outputs, *args, **kwargs):
        counts[-1] += not outputs.dim()
        return grad(outputs, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", counted)
        for losses in batches:
            counts.append(0)
            clipping.backward(losses)
    return counts


def in_batch(h, unknown):
    """A contrastive term: each sample against all others, by functions in the list or by one that is not."""
    distances = torch.cdist(h, h + 1) if unknown else h @ h.T
    return distances.logsumexp(1)


def test_a_contrastive_term_ramped_up_from_nothing_is_refused_where_it_begins():
    m, clipping = linear(), None
    clipping = PhantomClipping(m)

    def losses(weight):
        h = m(torch.randn(6, 3))
        return h.square().sum(1) + weight * in_batch(h, unknown=True)

    for _ in range(5):
        clipping.backward(lambda: losses(0.0))  # adds nothing yet
    for weight in (1e-3, 1.0):
        with pytest.raises(ClippingError, match=r"depends on another at .*linear with 'weight', 'bias'"):
            clipping.backward(lambda weight=weight: losses(weight))


def test_what_is_sure_to_mix_is_refused_with_any_weight():
    m, x = linear(), torch.randn(6, 3)
    with pytest.raises(ClippingError, match=r"depends on another at .*linear with 'weight', 'bias' through MmBackward"):
        PhantomClipping(m).norms(lambda: m(x).square().sum(1) + 0.0 * in_batch(m(x), unknown=False))


@pytest.mark.parametrize("mean", [lambda h: h.mean(0), lambda h: h.mean(0, keepdim=True).expand_as(h)])
def test_a_gate_on_the_batch_mean_that_starts_at_zero_is_refused_at_once(mean):
    """Its own gradient depends on the other samples before any gradient flows between them."""
    m = nn.ParameterDict({"w": torch.randn(3, 3), "gate": torch.zeros(3)})
    x = torch.randn(6, 3)
    with pytest.raises(ClippingError, match=r"another at .* with '(w|gate)' through"):
        PhantomClipping(m).norms(lambda: sums(x @ m["w"] + mean(x @ m["w"]) * m["gate"]))


def test_what_cannot_mix_samples_costs_no_second_pass():
    m, data, order = linear(), torch.randn(9, 6, 5, 3), torch.randperm(6)
    length, target = torch.randint(1, 6, (6,)), torch.randint(0, 3, (6, 5, 1))
    mask = torch.rand(6, 5) > 0.3

    def losses(t):
        x = data[t][order][mask.any(1)[:, None].expand(6, 5)].view(6, 5, 3)  # data, in any way
        h = m(torch.where(mask[..., None], x, 0.0))
        last = h[torch.arange(6), length - 1]
        picked = h.log_softmax(-1).gather(2, target)[..., 0]
        return last.square().sum(1) + (picked * mask).sum(1) + h[:, 1:].amax(1).sum(1)

    mask[:, 0] = True
    assert passes(m, [lambda t=t: losses(t) for t in range(9)]) == [2] + [1] * 8


def test_a_function_that_is_not_in_the_list_is_checked_every_time():
    m, x = linear(), torch.randn(6, 5, 3)
    assert passes(m, [lambda: torch.cdist(m(x), x).sum((1, 2))] * 4) == [2, 2, 2, 2]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


class Trusted(Square):
    samples_first = True


@pytest.mark.parametrize("function", [Square, Trusted])
def test_a_function_of_ones_own_is_trusted_if_it_says_so(function):
    m, x = linear(), torch.randn(6, 5, 3)
    again = 1 if function is Trusted else 2
    assert passes(m, [lambda: function.apply(m(x)).sum((1, 2))] * 3) == [2, again, again]


class Liar(torch.autograd.Function):
    """The identity, which says that it keeps samples apart; its gradient has a little of another sample in one number."""

    samples_first = True
    leak = 1e-4

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        g[0, 0, 0] += Liar.leak * g[1].norm()
        return g


def test_a_function_that_lies_about_its_samples_is_refused_in_the_first_batch():
    """There is no doubt in the graph, so that sums with random signs are compared, and not all numbers."""
    m, x = linear(), torch.randn(6, 50, 3)
    with pytest.raises(ClippingError, match="another"):
        PhantomClipping(m).backward(lambda: Liar.apply(m(x)).square().sum((1, 2)))


def test_the_first_batch_holds_no_second_gradient(monkeypatch):
    """Of the weighted pass only sums along the last dimension are kept, unless the graph leaves a doubt."""
    m, x, kept = nn.Linear(3, 40), torch.randn(6, 5, 3), []
    note = guard.WeightedPass._note

    def noted(weighted, use, gradient):
        note(weighted, use, gradient)
        kept.append(weighted._mixed[id(use)].numel() / gradient.numel())

    monkeypatch.setattr(guard.WeightedPass, "_note", noted)
    PhantomClipping(m).backward(lambda: sums(m(x)))
    PhantomClipping(m).backward(lambda: Square.apply(m(x)).sum((1, 2)))
    assert kept == [1 / 40, 1]


def test_samples_sorted_inside_the_model():
    """Loss i is that of the sample which was put in place i: its gradient is taken from that sample's row."""
    m, x = linear(), torch.randn(4, 3)
    exact_for_each_loss(m, lambda: m(x)[torch.tensor([3, 1, 2, 0])].square().sum(1))


def test_samples_across_two_dimensions_are_checked_every_time():
    """Where the samples lie is known, but not a part of one dimension: the guess that they are first must not stand."""
    m, x = nn.LayerNorm(3), torch.randn(4, 2, 3)
    second_batch(m, lambda: sums(m(x)), lambda: m(x).view(2, 4, 3).square().sum((0, 2)))


def test_batch_norm_before_the_first_parameter():
    module = nn.Sequential(nn.BatchNorm1d(3, affine=False), linear())
    x = torch.randn(6, 3)
    with pytest.raises(ClippingError, match="batch_norm"):
        PhantomClipping(module).norms(lambda: sums(module(x)))
    module.eval()
    assert PhantomClipping(module).norms(lambda: sums(module(x))).isfinite().all()


def test_one_mixed_pair_in_a_small_batch_is_always_found():
    m, x = linear(), torch.randn(8, 3)

    def losses():
        y = m(x)
        return y.square().sum(1) + torch.cat([y[1:2].sum(1), torch.zeros(7)])

    for _ in range(40):
        with pytest.raises(ClippingError, match="another"):
            PhantomClipping(m).norms(losses)


def test_gradients_below_the_normal_numbers_are_no_mixture():
    """Where attention is saturated, gradients have few bits left, and scaling them rounds."""
    model = nn.Linear(3, 2)
    x = torch.rand(64, 3, generator=torch.Generator().manual_seed(0)) * 1e-41 + 1e-42
    for _ in range(20):
        clipping = PhantomClipping(model, max_norm=1.0)
        clipping.backward(lambda: (torch.tanh(model(torch.ones(64, 3))) * x[:, :2] * 0.3).sum(1))

"""Samples must stay apart, and first: what mixes or moves them is noticed, also when an earlier batch looked harmless."""

import pytest
import torch
from torch import nn

from dpformer import PhantomClipping
from dpformer.errors import ClippingError
from tests.clipping.test_guard import linear, refuses, sums


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_time_first_is_noticed_even_when_batch_and_length_are_equal():
    refuses(linear(), lambda m, x: sums(m(x.transpose(0, 1)).transpose(0, 1)), "another", B=5)


def test_mixing_is_noticed_in_a_later_batch_of_another_structure():
    m, clipping = linear(), None
    clipping = PhantomClipping(m)
    x = torch.randn(4, 5, 3)
    clipping.backward(lambda: sums(m(x)))
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[0, :2] = mask[1, :2] = True  # four tokens, of two of the four samples
    with pytest.raises(ClippingError, match="another"):
        clipping.backward(lambda: torch.zeros(4).index_add(0, torch.tensor([0, 0, 1, 1]), sums(m(x[mask]))))


def second_batch(module, first, second, match="another"):
    """The first batch is harmless and leaves its structure checked; the second is not."""
    clipping = PhantomClipping(module)
    clipping.backward(first)
    with pytest.raises(ClippingError, match=match):
        clipping.backward(second)


def test_a_gate_that_starts_at_zero_does_not_hide_the_mixing():
    m, x = linear(), torch.randn(5, 5, 3)

    def losses(scale):
        return sums(scale * m(x.transpose(0, 1)).transpose(0, 1)) + scale * x.sum((1, 2))

    second_batch(m, lambda: losses(0.0), lambda: losses(1.0))


def test_samples_sorted_inside_the_model():
    m, x = linear(), torch.randn(4, 3)

    def losses(n):
        order = torch.argsort(torch.tensor(n))
        return m(x[order]).square().sum(1)  # forgets to put them back

    def gradient_moves(n):
        return m(x)[torch.argsort(torch.tensor(n))].square().sum(1)

    second_batch(m, lambda: gradient_moves([1, 2, 3, 4]), lambda: gradient_moves([4, 2, 3, 1]))
    assert losses([1, 2, 3, 4]).shape == (4,)


def test_tokens_packed_by_where():
    m, x = linear(), torch.randn(4, 3, 3)

    def losses(mask):
        rows, columns = torch.where(mask)
        return torch.zeros(4).index_add(0, rows, sums(m(x[rows, columns])))

    one_each = torch.tensor([[True, False, False]] * 4)
    uneven = torch.zeros(4, 3, dtype=torch.bool)
    uneven[0] = uneven[3, :1] = True
    uneven[0, 2] = uneven[0, 1] = True
    second_batch(m, lambda: losses(one_each), lambda: losses(uneven))


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

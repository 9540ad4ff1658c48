"""The Transformer, its attention, and what every sequence model must keep to."""

import pytest
import torch

from dpformer import TiedCrossEntropy
from dpformer.models import attention, error
from dpformer.models.recurrent import GRURecommender, LSTMRecommender
from dpformer.models.transformer import ReAttention, Transformer
from tests.clipping.oracle import assert_exact

ITEMS, LENGTH = 20, 12


def transformer(noise=1.0, **options):
    r = options.pop("reattention", ReAttention())
    model = Transformer(ITEMS, LENGTH, d=8, reattention=r, **options)
    if r is not None:
        frequencies = torch.linspace(1e-9, 1.0, ITEMS + 1).to(model.var_items)
        model.set_errors(noise, 10.0, frequencies, torch.linspace(1, 0.1, LENGTH).to(frequencies))
    return model


MODELS = {
    "vanilla": lambda: transformer(reattention=None),
    "re-attention": lambda: transformer(),
    "re-attention, 4 heads, post-norm, gelu": lambda: transformer(heads=4, norm="post", activation="gelu"),
    "literal": lambda: transformer(reattention=ReAttention("literal")),
    "tracked, not corrected": lambda: transformer(reattention=ReAttention("none")),
    "untied": lambda: transformer(reattention=None, tied=False),
    "gru": lambda: GRURecommender(ITEMS, 8),
    "lstm": lambda: LSTMRecommender(ITEMS, 8),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_causality_padding_and_determinism(name, float64):
    model = MODELS[name]().eval()
    s = torch.randint(1, ITEMS + 1, (4, 9))
    h = model(s)
    assert h.shape == (4, 9, 8)
    torch.testing.assert_close(model(s), h, rtol=0, atol=0)
    # the future does not change the past
    changed = s.clone()
    changed[:, 5:] = torch.randint(1, ITEMS + 1, (4, 4))
    torch.testing.assert_close(model(changed)[:, :5], h[:, :5])
    assert not torch.allclose(model(changed)[:, 5:], h[:, 5:])
    # a sequence alone and among longer ones
    short = torch.cat([s[:1, :6], torch.zeros(1, 3, dtype=torch.int64)], 1)
    torch.testing.assert_close(model(torch.cat([short, s[1:]]))[:1, :6], model(s[:1, :6]))
    # ranking scores: never padding, the same in a batch and alone
    scores = model.scores(torch.cat([short, s[1:]]), torch.tensor([6, 9, 9, 9]))
    assert scores.shape == (4, ITEMS + 1)
    assert (scores[:, 0] == -torch.inf).all()
    torch.testing.assert_close(scores[:1], model.scores(s[:1, :6], torch.tensor([6])))


@pytest.mark.parametrize("name", MODELS)
def test_exact_under_phantom_clipping_with_the_guard_on(name, float64):
    model, head = MODELS[name](), TiedCrossEntropy()

    def losses(m, batch):
        s, y = batch
        w = (y > 0) / (y > 0).sum(1, keepdim=True).clamp_min(1)
        return head(m(s), m.table, y, w.to(m.table.dtype), m.output_bias)

    s, y = torch.randint(1, ITEMS + 1, (4, 7)), torch.randint(1, ITEMS + 1, (4, 7))
    s[1, 3:] = y[1, 3:] = 0
    assert_exact(model, losses, s, y, tolerance=1e-8)


@pytest.mark.parametrize("heads", [1, 3])
def test_the_extra_coordinate_equals_the_explicit_form(heads, float64):
    q, k, v = (torch.randn(2, heads, 7, 5) for _ in range(3))
    penalty = error.penalty(q, torch.rand(2, heads, 7), cap=5.0)
    torch.testing.assert_close(attention.attend(q, k, v, penalty), attention.scores(q, k, penalty) @ v)
    torch.testing.assert_close(attention.attend(q, k, v), attention.scores(q, k) @ v)


def test_masked_keys_stay_masked():
    q, k = torch.randn(2, 1, 7, 5), torch.randn(2, 1, 7, 5)
    penalty = error.penalty(q, 1e14 * torch.rand(2, 1, 7), cap=5.0)
    assert not attention.scores(q, k, penalty).triu(1).any()
    out = attention.attend(q, k, torch.eye(7)[None, None].expand(2, 1, 7, 7)[..., :5].contiguous(), penalty)
    assert not out.triu(1).any()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_noise_it_is_vanilla_attention_bit_for_bit(norm):
    with_it, without = transformer(noise=0.0, norm=norm), transformer(reattention=None, norm=norm)
    without.load_state_dict(with_it.state_dict())
    s = torch.randint(1, ITEMS + 1, (4, 9))
    assert torch.equal(with_it(s), without(s))


def test_noise_changes_the_attention_and_training_only_leaves_inference_alone():
    model = transformer(reattention=ReAttention(training_only=True))
    plain = transformer(reattention=None)
    plain.load_state_dict(model.state_dict())
    s = torch.randint(1, ITEMS + 1, (4, 9))
    assert not torch.allclose(model(s), plain(s))
    assert torch.equal(model.eval()(s), plain(s))


def test_tracking_alone_changes_nothing_but_tells_the_variance():
    model = transformer(reattention=ReAttention("none"))
    plain = transformer(reattention=None)
    plain.load_state_dict(model.state_dict())
    s = torch.randint(1, ITEMS + 1, (4, 9))
    assert torch.equal(model(s), plain(s))
    first, second, _ = model.trace(s)
    assert (second.var >= first.var).all(), "a residual connection adds variance"


def test_no_overflow_for_the_rarest_item():
    model = transformer(noise=10.0)
    s = torch.ones(2, 12, dtype=torch.int64)  # item 1 has frequency 0.05, row 0 the floor of 1e-9
    model.var_items.fill_(float(error.effective_error(10.0, 10.0, 1e-9)))
    h = model(s)
    h.sum().backward()
    assert h.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_tracked_variance_of_the_first_keys_against_sampling(float64):
    """Noise on all parameters of a small model, many draws: the tracked variance of a block's input and output."""
    model = transformer(noise=0.02, reattention=ReAttention("none"), blocks=2).eval()
    model.embedding.weight.data.normal_()
    s = torch.randint(5, ITEMS + 1, (1, 6))
    model.set_errors(0.2, 10.0, torch.ones(ITEMS + 1), torch.ones(LENGTH))
    tracked = model.trace(s)[1].var
    clean = {n: p.detach().clone() for n, p in model.named_parameters()}
    std = float(model.var_blocks.sqrt())
    draws = []
    with torch.no_grad():
        for _ in range(2000):
            for n, p in model.named_parameters():
                p.copy_(clean[n] + (std * torch.randn_like(p) if "norm" not in n and "bias" not in n else 0))
            draws.append(model.trace(s)[1].x)
    sampled = torch.stack(draws).var(0).mean(-1)
    # First-order rules, averaged over coordinates: within a third.
    assert ((tracked / sampled - 1).abs() < 0.34).all(), tracked / sampled


def test_bad_arguments():
    with pytest.raises(ValueError, match="multiple of heads"):
        Transformer(5, 5, d=6, heads=4)
    with pytest.raises(ValueError, match="reattention"):
        Transformer(5, 5).set_errors(1.0, 1.0, torch.ones(6), torch.ones(5))

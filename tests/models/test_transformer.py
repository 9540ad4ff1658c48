"""The Transformer, its attention, and what every sequence model must keep to."""

import pytest
import torch

from dpformer import PhantomClipping, TiedCrossEntropy
from dpformer.models import (
    GRU,
    LSTM,
    ReAttention,
    RecurrentSpec,
    Transformer,
    TransformerSpec,
    attention,
    error,
    reattention,
)
from tests.clipping.oracle import assert_exact
from tests.clipping.test_apart import passes

ITEMS, LENGTH = 20, 12


def transformer(noise=1.0, **options):
    r = options.pop("reattention", ReAttention())
    model = Transformer(TransformerSpec(items=ITEMS, max_length=LENGTH, d=8, reattention=r, **options))
    if r is not None:
        frequencies = torch.linspace(1e-9, 1.0, ITEMS + 1).to(model.var_items)
        model.set_errors(noise, 10.0, frequencies, torch.linspace(1, 0.1, LENGTH).to(frequencies))
    return model


MODELS = {
    "vanilla": lambda: transformer(reattention=None),
    "re-attention": lambda: transformer(),
    "re-attention, 4 heads, post-norm": lambda: transformer(heads=4, norm="post"),
    "literal": lambda: transformer(reattention=ReAttention("literal")),
    "tracked, not corrected": lambda: transformer(reattention=ReAttention("none")),
    "recency and identity": lambda: transformer(reattention=None, recency=0.8, identity=True, blocks=1),
    "re-attention with recency": lambda: transformer(recency=0.8),
    "literal with recency": lambda: transformer(reattention=ReAttention("literal"), recency=0.8),
    "untied": lambda: transformer(reattention=None, tied=False),
    "gru": lambda: GRU(RecurrentSpec(kind="gru", items=ITEMS, d=8)),
    "lstm": lambda: LSTM(RecurrentSpec(kind="lstm", items=ITEMS, d=8)),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_causality_padding_and_determinism(name, float64):
    model = MODELS[name]().eval()
    s = torch.randint(1, ITEMS + 1, (4, 9))
    h = model.states(s)
    assert h.shape == (4, 9, 8)
    torch.testing.assert_close(model.states(s), h, rtol=0, atol=0)
    # the future does not change the past
    changed = s.clone()
    changed[:, 5:] = torch.randint(1, ITEMS + 1, (4, 4))
    torch.testing.assert_close(model.states(changed)[:, :5], h[:, :5])
    assert not torch.allclose(model.states(changed)[:, 5:], h[:, 5:])
    # a sequence alone and among longer ones
    short = torch.cat([s[:1, :6], torch.zeros(1, 3, dtype=torch.int64)], 1)
    torch.testing.assert_close(model.states(torch.cat([short, s[1:]]))[:1, :6], model.states(s[:1, :6]))
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
        return head(m.states(s), m.table, y, w.to(m.table.dtype), m.output_bias)

    s, y = torch.randint(1, ITEMS + 1, (4, 7)), torch.randint(1, ITEMS + 1, (4, 7))
    s[1, 3:] = y[1, 3:] = 0
    assert_exact(model, losses, s, y, tolerance=1e-8)


def explicit(q, k, penalty=None, bias=None):
    """The attention matrix as the formula has it."""
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if penalty is not None:
        logits = logits - penalty[0][..., :, None] * penalty[1][..., None, :]
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (logits if bias is None else logits + bias).masked_fill(future, -torch.inf).softmax(-1)


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_equals_the_explicit_form(heads, float64):
    q, k, v = (torch.randn(2, heads, 7, 5) for _ in range(3))
    penalty = reattention.penalty(q, torch.rand(2, heads, 7), cap=5.0)
    wide = reattention.with_penalty(q, k, penalty)
    torch.testing.assert_close(attention.kernel(*wide, v), explicit(q, k, penalty) @ v)
    torch.testing.assert_close(attention.scores(*wide, 5), explicit(q, k, penalty))
    torch.testing.assert_close(attention.attend(torch.stack((q, k, v), 2)), explicit(q, k) @ v)
    torch.testing.assert_close(attention.scores(q, k, 5), explicit(q, k))


@pytest.mark.parametrize("recency", [None, 0.8])
@pytest.mark.parametrize("L", [0, 1, 7, 64, 65, 150])
@pytest.mark.parametrize("way", ["by rows", "kernel"])
def test_attention_has_the_explicit_gradient(way, L, recency, float64, monkeypatch):
    monkeypatch.setattr(attention, "MATRIX", 2**14)
    monkeypatch.setattr(attention, "LONGEST", 512 if way == "by rows" else -1)
    q, k, v = (torch.randn(3, 2, L, 4, requires_grad=True) for _ in range(3))
    bias = None if recency is None else attention.recency_bias(L, recency)
    found, wanted = attention.attend(torch.stack((q, k, v), 2), bias=bias), explicit(q, k, bias=bias) @ v
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(found)
    gradients = [torch.autograd.grad(x, (q, k, v), upstream) for x in (found, wanted)]
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(attention.attend(torch.stack((q, k, v), 2), bias=bias), wanted)


@pytest.mark.parametrize("cap", [None, 5.0, 0.01])
@pytest.mark.parametrize("recency", [None, 0.8])
@pytest.mark.parametrize("L", [1, 7, 64, 65, 150])
@pytest.mark.parametrize("way", ["by rows", "kernel"])
def test_corrected_attention_has_the_explicit_output_error_and_gradient(way, L, recency, cap, float64, monkeypatch):
    monkeypatch.setattr(attention, "MATRIX", 2**14)  # several parts: of these samples, and of a sample
    monkeypatch.setattr(attention, "LONGEST", 512 if way == "by rows" else 0)
    q, k, v = (torch.randn(3, 2, L, 4, requires_grad=True) for _ in range(3))
    var_key, var_value = torch.rand(3, 2, L), torch.rand(3, 2, L)
    bias = None if recency is None else attention.recency_bias(L, recency)
    found, var = reattention.attend_corrected(torch.stack((q, k, v), 2), var_key, var_value, cap, bias=bias)
    matrix = explicit(q, k, reattention.penalty(q, var_key, cap), bias)
    torch.testing.assert_close(found, matrix @ v)
    torch.testing.assert_close(var, (matrix.detach() ** 2 * var_value[..., None, :]).sum(-1))
    assert not var.requires_grad
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, (q, k, v), upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(matrix @ v, (q, k, v), upstream))
    with torch.no_grad():
        again, none = reattention.attend_corrected(torch.stack((q, k, v), 2), var_key, None, cap, bias=bias)
    torch.testing.assert_close(again, found)
    assert none is None


@pytest.mark.parametrize("shape", [(0, 2, 7, 4), (3, 2, 0, 4)])
@pytest.mark.parametrize("last", [False, True])
def test_corrected_attention_of_nothing_is_nothing(shape, last):
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    var = torch.rand(shape[:-1])
    out, found = reattention.attend_corrected(torch.stack((q, k, v), 2), var, None if last else var, 5.0)
    assert out.shape == shape
    assert found is None if last else found.shape == shape[:-1]
    torch.autograd.grad(out.sum(), (q, k, v))


def test_corrected_attention_of_queries_that_lie_otherwise():
    q, k, v = (torch.randn(32, 4, 20, 2).permute(1, 3, 2, 0).requires_grad_() for _ in range(3))
    var, upstream = torch.rand(4, 2, 20), torch.randn(4, 2, 20, 32)
    found = torch.autograd.grad(
        reattention.attend_corrected(torch.stack((q, k, v), 2), var, var, None)[0], (q, k, v), upstream
    )
    matrix = explicit(q, k, reattention.penalty(q, var, None))
    torch.testing.assert_close(found, torch.autograd.grad(matrix @ v, (q, k, v), upstream), rtol=1e-3, atol=1e-4)


def test_what_no_function_of_our_own_can_do_is_left_to_torch(float64):
    model, s = transformer(reattention=None), torch.randint(1, ITEMS + 1, (3, 7))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    class States(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, s):
            return self.model.states(s)

    def loss(parameters, s):
        named = {f"model.{name}": value for name, value in parameters.items()}
        return torch.func.functional_call(States(), named, (s[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, s)
    for k in range(3):
        wanted = torch.autograd.grad(model.states(s[k : k + 1]).square().sum(), list(model.parameters()))
        for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(found[name][k], gradient)
    (first,) = torch.autograd.grad(model.states(s).square().sum(), model.embedding.weight, create_graph=False)
    assert first.any()
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(model.states(s).square().sum(), model.embedding.weight, create_graph=True)


def test_a_model_of_nothing_is_nothing():
    for shape in ((0, 5), (2, 0)):
        assert transformer(reattention=None).states(torch.zeros(shape, dtype=torch.int64)).shape[:2] == shape


def test_reattention_under_autocast():
    model, s = transformer(), torch.randint(1, ITEMS + 1, (3, 7))

    def losses(narrow):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            return model.states(s).float().square().sum((1, 2))

    found = PhantomClipping(model).norms(lambda: losses(True))
    torch.testing.assert_close(found, PhantomClipping(model).norms(lambda: losses(False)), rtol=0.05, atol=0)


def test_reattention_is_one_graph():
    model, s = transformer().train(), torch.randint(1, ITEMS + 1, (3, 7))
    torch.testing.assert_close(torch.compile(model.states, backend="eager", fullgraph=True)(s), model.states(s))


def test_attention_is_trusted_to_keep_samples_apart():
    """Else each batch would be checked by a second backward pass."""
    model, s = transformer().train(), torch.randint(1, ITEMS + 1, (3, 7))
    assert passes(model, [lambda: model.states(s).square().sum((1, 2))] * 3) == [2, 1, 1]


@pytest.mark.parametrize("no_grad", [False, True])
def test_masked_keys_stay_masked(no_grad):
    q, k = torch.randn(2, 1, 7, 5), torch.randn(2, 1, 7, 5)
    var = 1e14 * torch.rand(2, 1, 7)
    assert not attention.scores(*reattention.with_penalty(q, k, reattention.penalty(q, var, cap=5.0)), 5).triu(1).any()
    v = torch.eye(7)[None, None].expand(2, 1, 7, 7)[..., :5].contiguous()
    with torch.set_grad_enabled(not no_grad):
        out, _ = reattention.attend_corrected(torch.stack((q, k, v), 2), var, None, 5.0)
    assert not out.triu(1).any()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_noise_it_is_vanilla_attention_bit_for_bit(norm):
    with_it, without = transformer(noise=0.0, norm=norm), transformer(reattention=None, norm=norm)
    without.load_state_dict(with_it.state_dict())
    s = torch.randint(1, ITEMS + 1, (4, 9))
    assert torch.equal(with_it.states(s), without.states(s))


def test_noise_changes_the_attention_in_training_and_in_inference():
    model = transformer()
    plain = transformer(reattention=None)
    plain.load_state_dict(model.state_dict())
    s = torch.randint(1, ITEMS + 1, (4, 9))
    assert not torch.allclose(model.states(s), plain.states(s))
    assert not torch.allclose(model.eval().states(s), plain.states(s))


def test_tracking_alone_changes_nothing_but_tells_the_variance():
    model = transformer(reattention=ReAttention("none"))
    plain = transformer(reattention=None)
    plain.load_state_dict(model.state_dict())
    s = torch.randint(1, ITEMS + 1, (4, 9))
    assert torch.equal(model.states(s), plain.states(s))
    first, second, _ = model.trace(s)
    assert (second.var >= first.var).all(), "a residual connection adds variance"


def test_no_overflow_for_the_rarest_item():
    model = transformer(noise=10.0)
    s = torch.ones(2, 12, dtype=torch.int64)  # item 1 has frequency 0.05, row 0 the floor of 1e-9
    model.var_items.fill_(float(error.effective_error(10.0, 10.0, 1e-9)))
    h = model.states(s)
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
        TransformerSpec(items=5, max_length=5, d=6, heads=4)
    with pytest.raises(ValueError, match="reattention"):
        Transformer(TransformerSpec(items=5, max_length=5)).set_errors(1.0, 1.0, torch.ones(6), torch.ones(5))


def test_recency_is_attention_that_falls_off_with_the_lag(float64):
    model = transformer(reattention=None, recency=1.5, blocks=1)
    with torch.no_grad():
        model.blocks[0].qkv.weight[: model.embedding.embedding_dim] = 0
        model.blocks[0].qkv.bias[: model.embedding.embedding_dim] = 0
    s = torch.randint(1, ITEMS + 1, (2, 5))
    found = model.attention(s)[0][0, 0]
    for t in range(5):
        weights = torch.tensor([(1.0 + t - u) ** -1.5 for u in range(t + 1)])
        torch.testing.assert_close(found[t, : t + 1], weights / weights.sum(), rtol=1e-6, atol=0)
    assert "positions" not in dict(model.named_parameters())


def test_a_bias_in_the_kernel_equals_the_explicit_form(float64):
    q, k, v = (torch.randn(2, 2, 7, 5) for _ in range(3))
    bias = attention.recency_bias(7, 0.8).double()
    torch.testing.assert_close(attention.attend(torch.stack((q, k, v), 2), bias=bias), explicit(q, k, bias=bias) @ v)


def test_identity_starts_as_the_pooled_history(float64):
    model = transformer(reattention=None, recency=0.8, identity=True, blocks=1)
    s = torch.randint(1, ITEMS + 1, (2, 6))
    x = model.embedding(s)
    h = torch.nn.functional.layer_norm(x, (8,))
    pooled = x + model.attention(s)[0][:, 0] @ h
    torch.testing.assert_close(model.states(s), torch.nn.functional.layer_norm(pooled, (8,)))


def test_a_vocabulary_drops_other_items_and_scores_them_by_their_bias(float64):
    model = transformer(reattention=None, vocabulary=4).eval()
    p = torch.full((ITEMS + 1,), 0.01)
    best = torch.tensor([3, 9, 5, 7])
    p[best] = torch.tensor([0.5, 0.4, 0.3, 0.2])
    model.choose(p, bias=True)
    bias = (p / p[1:].sum()).log()
    assert len(model.table) == 5
    s, lengths = torch.tensor([[1, 3, 2, 7, 9], [2, 4, 6, 0, 0], [5, 0, 0, 0, 0]]), torch.tensor([5, 3, 1])
    scores = model.scores(s, lengths)
    assert scores.shape == (3, ITEMS + 1)
    assert (scores[:, 0] == -torch.inf).all()
    others = [i for i in range(1, ITEMS + 1) if i not in best]
    torch.testing.assert_close(scores[:, others], bias[others].expand(3, -1))
    # 3, 7 and 9 are rows 1, 4 and 2; a history without any of them leaves the bias alone
    last = model.states(torch.tensor([[1, 4, 2]]))[0, -1]
    torch.testing.assert_close(scores[0, best], bias[best] + model.table[1:] @ last)
    torch.testing.assert_close(scores[1, 1:], bias[1:])
    torch.testing.assert_close(scores[2, best], bias[best] + model.table[1:] @ model.states(torch.tensor([[3]]))[0, 0])
    # the cut to max_length comes after the vocabulary
    long = torch.cat([torch.full((1, 30), 9), torch.full((1, 30), 1), torch.tensor([[3]])], 1)
    short = torch.cat([torch.full((1, LENGTH - 1), 9), torch.tensor([[3]])], 1)
    torch.testing.assert_close(
        model.scores(long, torch.tensor([61])), model.scores(short, torch.tensor([LENGTH])), rtol=1e-9, atol=1e-9
    )


def test_the_vocabulary_and_its_bias_are_part_of_the_model(float64):
    model, other = transformer(reattention=None, vocabulary=4), transformer(reattention=None, vocabulary=4)
    model.choose(torch.linspace(0.1, 1, ITEMS + 1), bias=True)
    other.load_state_dict(model.state_dict())
    s, lengths = torch.randint(1, ITEMS + 1, (6, 9)), torch.full((6,), 9)
    assert torch.equal(model.eval().scores(s, lengths), other.eval().scores(s, lengths))


def test_reattention_reads_the_frequencies_of_the_vocabulary():
    model = Transformer(TransformerSpec(items=ITEMS, max_length=LENGTH, d=8, reattention=ReAttention(), vocabulary=2))
    p = torch.linspace(0.0, 1.0, ITEMS + 1)
    model.choose(p.clamp_min(1e-3), bias=False)
    model.set_errors(1.0, 10.0, p, torch.ones(LENGTH))
    torch.testing.assert_close(model.var_items[1:], error.effective_error(1.0, 10.0, p[[ITEMS, ITEMS - 1]]))


@pytest.mark.parametrize("L", [1, 7, 64, 65, 150])
def test_the_error_of_the_output_by_rows_is_that_of_the_whole_matrix(L):
    q, k, var = torch.randn(3, 2, L, 4), torch.randn(3, 2, L, 4), torch.rand(3, 2, L)
    whole = error.attention_output(var, attention.scores(q, k, 4))
    torch.testing.assert_close(reattention.output_error(q, k, var, None, 4), whole)

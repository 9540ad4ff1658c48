"""Functions of parameters alone, and layers of torch, against one sample at a time in float64."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn

from dpformer.clipping import PhantomClipping
from dpformer.errors import ClippingError
from tests.clipping.oracle import assert_exact

pytestmark = pytest.mark.usefixtures("float64")


def sums(y):
    return y.flatten(1).square().sum(1) + y.flatten(1).sin().sum(1)


class Module(nn.Module):
    """Parameters by name and a function of (self, x)."""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        self.register_buffer("mask", (torch.arange(12).view(3, 4) % 3 > 0).to(torch.get_default_dtype()))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.function(self, x)


W, V = {"w": (3, 4)}, {"v": (4,)}
ALONE = {
    "1 + w": (lambda m, x: x * (1 + m.v), V),
    "1 - p": (lambda m, x: x * (1 - m.v), V),
    "-exp(p)": (lambda m, x: x * -m.v.exp(), V),
    "2 * p": (lambda m, x: x @ (2 * m.w).T, W),
    "softmax": (lambda m, x: x * m.v.softmax(0), V),
    "sigmoid": (lambda m, x: x * torch.sigmoid(m.v), V),
    "normalize": (lambda m, x: F.linear(x, F.normalize(m.w)), W),
    "a mask": (lambda m, x: F.linear(x, m.w * m.mask), W),
    "a detached norm, as in DoRA": (lambda m, x: x @ (m.w * (m.v / m.w.norm(dim=0).detach())).T, W | V),
    "cat and stack": (lambda m, x: x @ torch.cat([m.w, m.w.flip(0)]).T + torch.stack([m.v, m.v]).mean(0).sum(), W | V),
    "chunk, split, unbind": (lambda m, x: x[..., :2] @ m.w.chunk(2, 1)[0].T + x @ m.w.split(1)[2].T + m.w.unbind(1)[0], W),
    "repeat": (lambda m, x: x @ m.w.repeat(2, 1).T, W),
    "a product of two": (lambda m, x: x @ (m.w * m.v).T, W | V),
    "a low-rank product": (lambda m, x: x @ (m.a @ m.b), {"a": (4, 2), "b": (2, 3)}),
    "a weight as its own input": (lambda m, x: x @ F.linear(m.w, m.w), {"w": (4, 4)}),
    "a penalty": (lambda m, x: sums(x @ m.w.T)[:, None] + 0.1 * m.w.square().sum() + m.w.norm(), W),
    "a function of a function": (lambda m, x: x @ torch.tanh(m.w.exp() / m.w.exp().sum(1, keepdim=True)).T, W),
    "used both ways": (lambda m, x: F.linear(F.linear(x, m.w) @ m.w.sigmoid(), m.w), W),
    "a table that is looked up": (lambda m, x: F.embedding((x[..., 0] > 0).long(), F.normalize(m.w)), W),
    "dropout of nothing on a table": (lambda m, x: x @ F.dropout(m.w, 0.0).T, W),
    "alpha": (lambda m, x: torch.add(x, m.v, alpha=3) + torch.sub(x, m.v, alpha=2), V),
    "addmm with alpha": (lambda m, x: torch.addmm(m.v, x[:, 0], m.w, alpha=2, beta=3), {"w": (4, 4)} | V),
    "a token for each sample, by repeat": (lambda m, x: torch.cat([m.q.repeat(len(x), 1, 1), x], 1), {"q": (1, 4)}),
    "learned queries": (lambda m, x: F.softmax(F.layer_norm(m.q, (4,)) @ x.mT, -1) @ x, {"q": (2, 4)}),
    "expanded queries": (
        lambda m, x: F.softmax(F.layer_norm(m.q.expand(len(x), -1, -1), (4,)) @ x.mT, -1) @ x, {"q": (2, 4)}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_functions_of_parameters_alone(name):
    function, shapes = ALONE[name]
    assert_exact(Module(function, **shapes), lambda m, b: sums(m(b[0])), torch.randn(3, 5, 4))


MET = {
    "x / p": (lambda m, x: x / m.v, V),
    "p / x": (lambda m, x: m.v / (3 + x.square()), V),
    "x ** p": (lambda m, x: (1 + x.square()) ** m.v, V),
    "where(mask, p, x)": (lambda m, x: torch.where(x > 0, m.v, x), V),
    "maximum": (lambda m, x: torch.maximum(x, m.v), V),
    "lerp": (lambda m, x: torch.lerp(x, x.sin(), m.v), V),
    "p[ids] of a vector": (lambda m, x: m.v[(x[..., 0] > 0).long()], V),
    "p[ids] of a matrix each": (lambda m, x: (m.e[(x[:, 0, 0] > 0).long()] @ x.mT).mT, {"e": (2, 3, 4)}),
    "p[i, j]": (lambda m, x: m.w[(x[..., 0] > 0).long(), (x[..., 1] > 0).long()], W),
    "einsum": (lambda m, x: torch.einsum("btd,ed->bte", x, m.w), W),
    "einsum of experts": (lambda m, x: torch.einsum("btd,kde->btke", x, m.e), {"e": (2, 4, 3)}),
    "experts, one after another": (lambda m, x: torch.stack([x @ m.e[k] for k in range(2)]).sum(0), {"e": (2, 4, 3)}),
    "experts by bmm": (lambda m, x: torch.bmm(x.transpose(0, 1)[:2], m.e).transpose(0, 1), {"e": (2, 4, 3)}),
    "experts by matmul": (lambda m, x: x[:, None] @ m.e, {"e": (2, 4, 3)}),
    "a part for each sample": (
        lambda m, x: torch.bmm(x.repeat_interleave(2, 0), (m.e + 1).repeat(len(x), 1, 1)).unflatten(0, (-1, 2)),
        {"e": (2, 4, 3)}),
    "a part for each sample, by einsum": (
        lambda m, x: torch.einsum("tbd,sbd->bts", x.transpose(0, 1), m.w[:, None].expand(-1, len(x), -1) * 2), W),
    "a parameter from the left": (lambda m, x: m.w @ x.mT[:, None], W),
    "a bias by relative position, added": (
        lambda m, x: (x @ x.mT + m.v[(torch.arange(5)[:, None] - torch.arange(5)).abs() % 4]).softmax(-1) @ x, V),
    "a bias by relative position, sdpa": (
        lambda m, x: F.scaled_dot_product_attention(
            *[x[:, None]] * 3, m.w[(torch.arange(5)[:, None] - torch.arange(5)).abs() % 3].permute(2, 0, 1)[None, :1]), W),
}  # fmt: skip


@pytest.mark.parametrize("name", MET)
def test_functions_that_meet_the_batch(name):
    function, shapes = MET[name]
    assert_exact(Module(function, **shapes), lambda m, b: sums(m(b[0])), torch.randn(3, 5, 4))


def test_a_number_that_carries_a_gradient_is_no_constant():
    """Of a batch of one: it would be taken for a constant otherwise, and its gradient lost."""
    module = Module(lambda m, x: x * ((x @ m.w.T).sum() * m.v), **W, **V)
    assert_exact(module, lambda m, b: sums(m(b[0])), torch.randn(1, 5, 4))


def test_data_made_inside_of_the_closure():
    module, numbers = nn.Linear(4, 3), torch.randn(3, 5, 4).tolist()
    norms = PhantomClipping(module).norms(lambda: sums(module(torch.tensor(numbers))))
    x = torch.tensor(numbers)
    torch.testing.assert_close(norms, PhantomClipping(module).norms(lambda: sums(module(x))))


@pytest.mark.parametrize("table", [lambda m: 2 * m.w, lambda m: m.w.T.exp()])
def test_ids_that_a_model_has_cached(table):
    """They are not made in the pass: that they are the same for all samples shows where rows meet the batch."""
    ids = torch.tensor([0, 2, 1, 1, 0])
    module = Module(lambda m, x: x[..., :3] + table(m)[ids][None, :, :3].contiguous(), **W)
    assert_exact(module, lambda m, b: sums(m(b[0])), torch.randn(3, 5, 4))


def test_grouped_products_refuse_what_has_no_rule():
    module, x = nn.ParameterDict({"w": torch.randn(3, 4, 8)}).float(), torch.randn(3, 8, 4).float()
    with pytest.raises(ClippingError, match=r"'w'.*grouped_mm.*alone"):
        PhantomClipping(module).norms(lambda: sums(F.grouped_mm(x, module["w"])))


def layer(make, shape, call=lambda m, x: m(x)):
    return make, shape, call


LAYERS = {
    "Conv1d": layer(lambda: nn.Conv1d(4, 6, 3, padding=1), (3, 4, 7)),
    "Conv1d, groups": layer(lambda: nn.Conv1d(4, 4, 3, groups=4, padding=2), (3, 4, 7)),
    "Conv1d, dilated": layer(lambda: nn.Conv1d(4, 6, 3, dilation=2, stride=2), (3, 4, 9)),
    "Conv2d": layer(lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), (3, 2, 6, 5)),
    "Conv2d, circular": layer(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (3, 2, 6, 5)),
    "Conv2d, same": layer(lambda: nn.Conv2d(2, 3, 3, padding="same"), (3, 2, 6, 5)),
    "Conv3d": layer(lambda: nn.Conv3d(2, 3, 2), (3, 2, 4, 3, 3)),
    "ConvTranspose1d": layer(lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), (3, 4, 5)),
    "ConvTranspose2d": layer(lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2), (3, 2, 4, 5)),
    "weight norm": layer(lambda: parametrizations.weight_norm(nn.Conv1d(4, 3, 2)), (3, 4, 5)),
    "spectral norm": layer(lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), (3, 5, 4)),
    "orthogonal": layer(lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (3, 5, 4)),
    "GroupNorm": layer(lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "InstanceNorm": layer(lambda: nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 2)),
    "BatchNorm, eval": layer(lambda: nn.BatchNorm2d(4).eval(), (3, 4, 5, 2)),
    "EmbeddingBag": layer(lambda: nn.EmbeddingBag(9, 4), (3, 5), lambda m, x: m(x.abs().mul(3).long().clamp(max=8))),
    "EmbeddingBag, padding": layer(
        lambda: nn.EmbeddingBag(9, 4, mode="sum", padding_idx=0), (3, 5), lambda m, x: m(x.abs().mul(2).long())),
    "EmbeddingBag, max": layer(
        lambda: nn.EmbeddingBag(9, 4, mode="max"), (3, 5), lambda m, x: m(x.abs().mul(3).long().clamp(max=8))),
    "Bilinear": layer(lambda: nn.Bilinear(4, 4, 3), (3, 5, 4), lambda m, x: m(x, x.sin())),
    "PReLU": layer(lambda: nn.PReLU(4), (3, 4, 5)),
    "PReLU, one": layer(lambda: nn.PReLU(), (3, 4, 5)),
    "MultiheadAttention": layer(lambda: nn.MultiheadAttention(4, 2, batch_first=True), (3, 5, 4), lambda m, x: m(x, x, x)[0]),
    "MultiheadAttention, no weights": layer(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True), (3, 5, 4), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "MultiheadAttention, key and value": layer(
        lambda: nn.MultiheadAttention(4, 2, kdim=6, vdim=2, batch_first=True), (3, 5, 4),
        lambda m, x: m(x, x[..., [0, 1, 2, 3, 0, 1]].sin(), x[..., :2].cos())[0]),
    "TransformerEncoder": layer(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2), (3, 5, 4)),
    "TransformerDecoderLayer": layer(
        lambda: nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True), (3, 5, 4), lambda m, x: m(x, x.sin())),
    "Transformer": layer(
        lambda: nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True), (3, 5, 4), lambda m, x: m(x, x.cos())),
    "LSTM": layer(lambda: nn.LSTM(4, 3, 2, batch_first=True), (3, 5, 4), lambda m, x: m(x)[0]),
    "LSTM, both ways, last state": layer(
        lambda: nn.LSTM(4, 3, bidirectional=True, batch_first=True), (3, 5, 4), lambda m, x: m(x)[1][1].transpose(0, 1)),
    "LSTM, projection": layer(lambda: nn.LSTM(4, 3, proj_size=2, batch_first=True), (3, 5, 4), lambda m, x: m(x)[0]),
    "LSTM, no bias": layer(lambda: nn.LSTM(4, 3, bias=False, batch_first=True), (3, 5, 4), lambda m, x: m(x)[0]),
    "LSTM, time first": layer(lambda: nn.LSTM(4, 3), (3, 5, 4), lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1)),
    "GRU": layer(lambda: nn.GRU(4, 3, 2, bidirectional=True, batch_first=True), (3, 5, 4), lambda m, x: m(x)[0]),
    "RNN": layer(lambda: nn.RNN(4, 3, nonlinearity="relu", batch_first=True), (3, 5, 4), lambda m, x: m(x)[0]),
    "LSTMCell": layer(lambda: nn.LSTMCell(4, 3), (3, 4), lambda m, x: m(x, m(x))[1]),
    "GRUCell": layer(lambda: nn.GRUCell(4, 3), (3, 4), lambda m, x: m(x, m(x))),
    "RNNCell": layer(lambda: nn.RNNCell(4, 3), (3, 4), lambda m, x: m(x, m(x))),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    make, shape, call = LAYERS[name]
    assert_exact(make(), lambda m, b: sums(call(m, b[0])), torch.randn(shape))


def test_packed_sequences():
    def losses(m, b):
        x, lengths = b
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return sums(m(packed)[1].transpose(0, 1))

    gru = nn.GRU(4, 3, batch_first=True, bidirectional=True)
    assert_exact(gru, losses, torch.randn(3, 5, 4), torch.tensor([5, 3, 2]))


def test_frames_merged_with_samples():
    """A convolution on `[B * T, ...]`: a video, frame by frame."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.PReLU(3), nn.ConvTranspose2d(3, 2, 2))
    assert_exact(model, lambda m, b: sums(m(b[0].flatten(0, 1)).unflatten(0, (-1, 2))), torch.randn(3, 2, 2, 5, 5))


def test_large_gradients_are_computed_for_a_few_samples_at_a_time(monkeypatch):
    monkeypatch.setattr("dpformer.clipping.gradient.FORMED_ELEMENTS", 100)
    module = Module(lambda m, x: F.linear(x, F.normalize(m.w)) * m.v[:3].exp(), **W, **V)
    assert_exact(module, lambda m, b: sums(m(b[0])), torch.randn(7, 5, 4))


def test_a_sample_without_a_finite_gradient_adds_nothing():
    module = Module(lambda m, x: x * (1 + m.v), **V)
    x = torch.randn(4, 5, 4)
    x[2, 0, 0] = math.nan
    clipping = PhantomClipping(module, rule="flat")
    norms = clipping.backward(lambda: sums(module(x)))
    bad = module.v.grad.clone()
    module.v.grad = None
    clipping.backward(lambda: sums(module(x[[0, 1, 3]])))
    assert norms[2].isnan()
    torch.testing.assert_close(bad, module.v.grad)


def test_a_parameter_that_a_batch_does_not_use_has_no_gradient():
    experts = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    x = torch.randn(3, 5, 4)
    clipping = PhantomClipping(experts)
    clipping.backward(lambda: sums(experts[0](x)))
    assert not experts[1].weight.grad.any()
    with pytest.raises(ClippingError, match=r"'1.weight' \(and 1 more\).*none of 1 batches"):
        clipping.check_used()
    clipping.backward(lambda: sums(experts[1](x)))
    clipping.check_used()


def test_never_used_is_an_error_after_a_while():
    experts = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    clipping, x = PhantomClipping(experts), torch.ones(2, 2)
    for _ in range(99):
        clipping.backward(lambda: sums(experts[0](x)))
    with pytest.raises(ClippingError, match=r"'1.weight'.*none of 100 batches"):
        clipping.backward(lambda: sums(experts[0](x)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_run_as_they_were_written(backend):
    module, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(3, 4)
    compiled = torch.compile(module, backend=backend)
    compiled(x)
    expected = PhantomClipping(module).norms(lambda: sums(module(x)))
    torch.testing.assert_close(PhantomClipping(compiled).norms(lambda: sums(compiled(x))), expected)
    torch.testing.assert_close(PhantomClipping(module).norms(lambda: sums(compiled(x))), expected)


def test_wrappers_that_add_up_gradients_are_refused(tmp_path):
    with pytest.raises(ClippingError, match=r"DataParallel.*before noise is added, once"):
        PhantomClipping(nn.DataParallel(nn.Linear(4, 3)))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(ClippingError, match=r"DistributedDataParallel.*before noise is added, once"):
            PhantomClipping(nn.parallel.DistributedDataParallel(nn.Linear(4, 3)))
    finally:
        dist.destroy_process_group()


def test_dropout_on_a_table():
    """One mask for all samples, drawn by the model: the same in the loop."""

    def dropped(m, x):
        torch.manual_seed(5)
        return x @ F.dropout(m.w, 0.5).T + F.embedding((x[..., 0] > 0).long(), F.dropout(m.w, 0.5))[..., :3]

    assert_exact(Module(dropped, **W), lambda m, b: sums(m(b[0])), torch.randn(3, 5, 4))

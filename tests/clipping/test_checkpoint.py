"""Activation checkpointing: what is computed again in the backward pass goes through the same rules, and is exact."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpformer import PhantomClipping
from dpformer.errors import ClippingError
from tests.clipping.oracle import assert_exact
from tests.clipping.test_guard import linear, sums

pytestmark = pytest.mark.usefixtures("float64")


class Block(nn.Module):
    """Rules of every kind: linear maps, look-ups, norms, a slice of a table, a derived weight, a convolution, dropout."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.conv = nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 3, padding=1)
        self.positions, self.scale = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(4))
        self.calls = 0

    def forward(self, x, dropout=0.0):
        self.calls += 1
        x = self.norm(x + self.positions[: x.shape[1]])
        x = F.dropout(torch.tanh(F.linear(self.mix(x), F.normalize(self.mix.weight))), dropout)
        last = x[torch.arange(len(x)), torch.full((len(x),), 2)]  # an index that the guard reads
        return x * self.scale.exp() + self.conv(x.mT).mT + last[:, None]


class Model(nn.Module):
    def __init__(self, checkpointed=True):
        super().__init__()
        self.table, self.blocks = nn.Embedding(11, 4), nn.ModuleList([Block(), Block()])
        self.checkpointed = checkpointed

    def losses(self, s, dropout=0.0):
        x = self.table(s)
        for block in self.blocks:
            x = checkpoint(block, x, dropout, use_reentrant=False) if self.checkpointed else block(x, dropout)
        return F.cross_entropy((x @ self.table.weight.T).mT, s, reduction="none").sum(1)


def test_exact_with_every_block_in_a_checkpoint():
    assert_exact(Model(), lambda m, b: m.losses(*b), torch.randint(0, 11, (3, 5)))


def test_each_block_is_computed_twice_and_its_uses_are_recorded_once():
    model, s = Model(), torch.randint(0, 11, (3, 5))
    clipping = PhantomClipping(model)
    clipping.backward(lambda: model.losses(s))
    for block in model.blocks:
        block.calls = 0
    model.zero_grad()
    clipping.backward(lambda: model.losses(s))
    # Once in the forward pass, once in the backward pass, and once for each of the two tensors of ids that the guard reads.
    assert [block.calls for block in model.blocks] == [4, 4]


def test_dropout_is_the_same_when_it_is_computed_again():
    model, s = Model(), torch.randint(0, 11, (3, 5))
    results = []
    for model.checkpointed in (True, False):
        torch.manual_seed(3)
        model.zero_grad()
        norms = PhantomClipping(model).backward(lambda: model.losses(s, 0.5))
        results.append([norms, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("experts", [False, True])
def test_hugging_face(experts):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "max_position_embeddings": 16, "pad_token_id": 0}
    if experts:
        more = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        more |= {"num_local_experts": 3, "num_key_value_heads": 1, "experts_implementation": "eager"}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more)).double()
    else:
        more = {"n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **more)).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    def losses(m, batch):
        logits = m(input_ids=batch[0], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].mT, batch[0][:, 1:], reduction="none").sum(1)

    assert model.is_gradient_checkpointing
    assert_exact(model, losses, torch.randint(3, 31, (3, 7)))


@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 3)])
def test_reentrant_checkpoints_are_refused_with_the_cure(shape):
    module = nn.ModuleList([linear(), nn.Sequential(linear(), nn.Tanh(), linear())])
    x = torch.randn(shape)
    with pytest.raises(ClippingError, match="use_reentrant=False"):
        PhantomClipping(module).norms(lambda: sums(checkpoint(module[1], module[0](x), use_reentrant=True)))


@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 3)])
def test_exact_where_inputs_and_weights_have_one_shape(shape):
    """A square batch once let the recomputation put an input in the place of a weight."""
    module = nn.ModuleList([linear(), nn.Sequential(linear(), nn.Tanh(), linear())]).double()

    def losses(m, b):
        return sums(checkpoint(m[1], m[0](b[0]), use_reentrant=False))

    assert_exact(module, losses, torch.randn(shape))


def test_other_hooks_on_saved_tensors_are_refused():
    module, x = linear().double(), torch.randn(4, 5, 3)

    def losses():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            return sums(module(x))

    with pytest.raises(ClippingError, match=r"'weight', 'bias'.*hooks on saved tensors"):
        PhantomClipping(module).norms(losses)


def test_a_recomputation_past_the_recorder_is_noticed(monkeypatch):
    """The planted defect: the recorder is not active while a checkpoint is computed again."""
    model, s = Model(), torch.randint(0, 11, (3, 5))

    def blind(self, total, retain_graph):
        torch.autograd.grad(total, self.anchor, allow_unused=True, retain_graph=retain_graph)

    monkeypatch.setattr("dpformer.clipping.recorder.Recorder.backward", blind)
    with pytest.raises((ClippingError, RuntimeError)):
        PhantomClipping(model).norms(lambda: model.losses(s))


def test_mixing_inside_a_checkpoint_is_refused():
    module, x = linear().double(), torch.randn(4, 3)
    with pytest.raises(ClippingError, match="another"):
        PhantomClipping(module).norms(
            lambda: sums(checkpoint(lambda h: h + module(h).mean(0), module(x), use_reentrant=False))
        )

"""Hugging Face models that tie their heads, from random weights."""

import os

import pytest
import torch
from torch.nn import functional as F

from dpformer import PhantomClipping
from dpformer.clipping.recorder import Recorder
from tests.clipping.oracle import assert_exact

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 31, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2():
    sizes = {
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, bos_token_id=1, eos_token_id=2, **sizes))


def llama():
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, **sizes, num_key_value_heads=1, tie_word_embeddings=True)
    )


def opt():
    sizes = {
        "hidden_size": 8,
        "ffn_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 8,
    }
    return transformers.OPTForCausalLM(transformers.OPTConfig(**SMALL, **sizes, dropout=0.0))


def losses(model, batch):
    (s,) = batch
    return F.cross_entropy(model(input_ids=s).logits[:, :-1].transpose(1, 2), s[:, 1:], reduction="none").sum(1)


@pytest.mark.parametrize("make", [gpt2, llama, opt])
def test_exact(make):
    torch.manual_seed(0)
    model = make().double()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert_exact(model, losses, torch.randint(3, 31, (3, 7)))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_layout_of_samples_is_evident(make):
    """So that no second backward pass is needed to check it."""
    model = make()
    recorder = Recorder(model)
    with recorder:
        losses(model, (torch.randint(3, 31, (3, 7)),))
    assert all(use.superseded or 3 in (use.shape[0], use.merged) for use in recorder.uses)


def test_dropout_in_training():
    model = gpt2()
    model.transformer.drop.p = 0.5
    model.train()
    s = torch.randint(3, 31, (3, 7))
    assert PhantomClipping(model).backward(lambda: losses(model, (s,))).isfinite().all()

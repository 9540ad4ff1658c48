"""Hugging Face models that tie their heads, from random weights."""

import os

import pytest
import torch
from torch.nn import functional as F

from dpformer import PhantomClipping
from tests.clipping.oracle import assert_exact
from tests.clipping.test_apart import passes

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 31, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2(**more):
    sizes = {
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    }
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=31, bos_token_id=1, eos_token_id=2, **sizes, **more)
    )


def llama(**more):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, **SIZES, num_key_value_heads=1, tie_word_embeddings=True, **more)
    )


def opt(**more):
    sizes = {
        "hidden_size": 8,
        "ffn_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 8,
    }
    return transformers.OPTForCausalLM(transformers.OPTConfig(**SMALL, **sizes, dropout=0.0, **more))


def bert(**more):
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **SIZES, **more)).eval()


def t5(**more):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=31, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, **sizes, **more)
    )


def losses(model, batch):
    (s,) = batch
    return F.cross_entropy(model(input_ids=s).logits[:, :-1].transpose(1, 2), s[:, 1:], reduction="none").sum(1)


def padded_losses(model, batch):
    s, mask = batch
    more = {"decoder_input_ids": s.flip(1)} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=s, attention_mask=mask, **more).logits
    each = F.cross_entropy(logits.transpose(1, 2), s, reduction="none")
    return (each * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("make", [gpt2, llama, opt])
def test_exact(make):
    torch.manual_seed(0)
    model = make().double()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert_exact(model, losses, torch.randint(3, 31, (3, 7)))


@pytest.mark.parametrize(
    "experts", ["eager", "batched_mm"]
)  # grouped_mm, which has float32 alone: test_architectures.py
def test_experts(experts):
    torch.manual_seed(0)
    sizes = {"num_local_experts": 3, "num_key_value_heads": 1, "experts_implementation": experts}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **SIZES, **sizes)).double().eval()
    assert model.config._experts_implementation == experts
    assert_exact(model, losses, torch.randint(3, 31, (3, 7)))


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (gpt2, "eager"),
        (gpt2, "sdpa"),
        (bert, "eager"),
        (bert, "sdpa"),
        (llama, "eager"),
        (llama, "sdpa"),
        (t5, "eager"),
    ],
)
def test_padding_masks_cost_no_second_pass(make, attention):
    """But for the first batch, which is always checked."""
    model = make(attn_implementation=attention)

    mask = (torch.arange(7) < torch.tensor([[7], [5], [2]])).long()
    steps = [lambda s=s: padded_losses(model, (s, mask)) for s in torch.randint(3, 31, (4, 3, 7))]
    assert passes(model, steps) == [2, 1, 1, 1]


def test_dropout_in_training():
    model = gpt2()
    model.transformer.drop.p = 0.5
    model.train()
    s = torch.randint(3, 31, (3, 7))
    assert PhantomClipping(model).backward(lambda: losses(model, (s,))).isfinite().all()

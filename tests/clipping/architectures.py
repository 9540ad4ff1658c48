"""Sixty architectures of text, vision, audio, time series, tables and recurrence, small and from random weights.

`scripts/architectures.py` writes the table of docs/clipping.md from this list; test_architectures.py checks it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers as hf

from dpformer import PhantomClipping

B, L, V = 3, 8, 29
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """make: the model, for an attention ("eager" or "sdpa"); batch: its inputs, with padding or without; losses `[B]`."""

    name: str
    domain: str
    make: Callable[[str], nn.Module]
    batch: Callable[[bool], Batch]
    losses: Callable[[nn.Module, Batch], Tensor]
    attentions: tuple[str, ...] = ("eager", "sdpa")
    paddings: tuple[bool, ...] = (False, True)


ALL: list[Architecture] = []
BOTH, NONE = ("eager", "sdpa"), ("none",)


def add(name, domain, make, batch, losses, attentions=BOTH, paddings=(False, True)) -> None:
    ALL.append(Architecture(name, domain, make, batch, losses, attentions, paddings))


def measure(y: Tensor) -> Tensor:
    """A loss of any output, `[B, ...]` to `[B]`."""
    y = y.flatten(1)
    return y.square().mean(1) + y.sin().mean(1)


def output(model: nn.Module, batch: Batch) -> Tensor:
    out = model(**batch)
    return out[0] if isinstance(out, tuple) else next(v for v in out.values() if isinstance(v, Tensor) and v.dim())


def text(padded: bool) -> Batch:
    ids = torch.randint(3, V, (B, L))
    if not padded:
        return {"input_ids": ids}
    mask = (torch.arange(L) < torch.tensor([[L], [5], [2]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def pairs(padded: bool) -> Batch:
    return {**text(padded), "decoder_input_ids": torch.randint(3, V, (B, 6))}


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the next token, or of the token itself; a mean over a sample's own positions."""
    logits, ids = model(**batch).logits, batch.get("decoder_input_ids", batch["input_ids"])
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    mask = (
        batch["attention_mask"][:, 1:]
        if "attention_mask" in batch and each.shape[1] == L - 1
        else torch.ones_like(each)
    )
    return (each * mask).sum(1) / mask.sum(1).clamp_min(1)


def hidden_losses(model: nn.Module, batch: Batch) -> Tensor:
    return measure(output(model, batch))


IDS = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LONG = {"max_position_embeddings": 32}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
BART = {
    **{
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    },
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1, "forced_eos_token_id": None},
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}


def made(model: str, **config) -> Callable[[str], nn.Module]:
    def make(attention: str) -> nn.Module:
        kind = getattr(hf, model)
        implementation = {} if attention == "none" else {"attn_implementation": attention}
        return kind(kind.config_class(**config, **implementation)).eval()

    return make


def causal(name: str, model: str, attentions=BOTH, **config) -> None:
    add(name, "text", made(model, **IDS, **config), text, token_losses, attentions)


def seq2seq(name: str, model: str, attentions=BOTH, **config) -> None:
    add(name, "text", made(model, **IDS, **config), pairs, token_losses, attentions)


causal("GPT-2", "GPT2LMHeadModel", **GPT)
causal(
    "GPT-Neo",
    "GPTNeoForCausalLM",
    NONE,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    attention_types=[[["global", "local"], 1]],
    **LONG,
)
causal("GPT-J", "GPTJForCausalLM", NONE, **GPT, rotary_dim=4)
causal("GPT-NeoX", "GPTNeoXForCausalLM", **SIZES, **LONG)
causal(
    "OPT",
    "OPTForCausalLM",
    hidden_size=16,
    ffn_dim=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    word_embed_proj_dim=16,
    **LONG,
)
causal("BLOOM", "BloomForCausalLM", NONE, hidden_size=16, n_layer=2, n_head=2)
causal("Falcon", "FalconForCausalLM", hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
causal("Llama", "LlamaForCausalLM", **SIZES, num_key_value_heads=1, tie_word_embeddings=True, **LONG)
causal("Mistral", "MistralForCausalLM", **SIZES, num_key_value_heads=1, sliding_window=4, **LONG)
causal("Mixtral (experts)", "MixtralForCausalLM", **SIZES, num_key_value_heads=1, num_local_experts=3, **LONG)
causal("Qwen 2", "Qwen2ForCausalLM", **SIZES, num_key_value_heads=1, **LONG)
causal("Qwen 3", "Qwen3ForCausalLM", **SIZES, num_key_value_heads=1, head_dim=8, **LONG)
causal("Phi", "PhiForCausalLM", **SIZES, **LONG)
causal("Phi 3", "Phi3ForCausalLM", **SIZES, num_key_value_heads=1, **LONG)
causal("Gemma", "GemmaForCausalLM", **SIZES, num_key_value_heads=1, head_dim=8, **LONG)
causal("Gemma 2", "Gemma2ForCausalLM", ("eager",), **SIZES, num_key_value_heads=1, head_dim=8, **LONG)
causal("OLMo 2", "Olmo2ForCausalLM", **SIZES, **LONG)
causal("Cohere", "CohereForCausalLM", **SIZES, **LONG)
causal("MPT", "MptForCausalLM", NONE, d_model=16, n_heads=2, n_layers=2, expansion_ratio=2, max_seq_len=32)
causal("Mamba", "MambaForCausalLM", NONE, hidden_size=16, num_hidden_layers=2, state_size=4)
causal(
    "Mamba 2",
    "Mamba2ForCausalLM",
    NONE,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    num_heads=4,
    head_dim=8,
    n_groups=2,
    chunk_size=4,
)

causal("BERT", "BertForMaskedLM", **SIZES, **LONG)
causal("RoBERTa", "RobertaForMaskedLM", **SIZES, **LONG)
causal("DistilBERT", "DistilBertForMaskedLM", dim=16, hidden_dim=24, n_layers=2, n_heads=2, **LONG)
causal(
    "ALBERT (one block, 3 times)", "AlbertForMaskedLM", **(SIZES | {"num_hidden_layers": 3}), embedding_size=8, **LONG
)
causal("ELECTRA", "ElectraForMaskedLM", **SIZES, embedding_size=8, **LONG)
causal(
    "DeBERTa v2",
    "DebertaV2ForMaskedLM",
    NONE,
    **SIZES,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=4,
    **LONG,
)
causal("ModernBERT", "ModernBertForMaskedLM", **SIZES, local_attention=4, reference_compile=False, **LONG)
causal("MPNet", "MPNetForMaskedLM", NONE, **SIZES, **LONG)
causal("ConvBERT", "ConvBertForMaskedLM", NONE, **SIZES, embedding_size=16, head_ratio=1, conv_kernel_size=3, **LONG)
causal("RoFormer", "RoFormerForMaskedLM", NONE, **SIZES, embedding_size=16, **LONG)
causal("XLNet", "XLNetLMHeadModel", NONE, d_model=16, n_layer=2, n_head=2, d_inner=24)

seq2seq("BART", "BartForConditionalGeneration", **BART, **LONG)
seq2seq("Marian", "MarianMTModel", **BART, **LONG)
seq2seq("Pegasus", "PegasusForConditionalGeneration", **BART, **LONG)
seq2seq("T5", "T5ForConditionalGeneration", **T5)
seq2seq(
    "Switch (experts)",
    "SwitchTransformersForConditionalGeneration",
    ("eager",),
    **T5,
    num_experts=2,
    expert_capacity=64,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
)


def images(padded: bool) -> Batch:
    return {"pixel_values": torch.randn(B, 3, 16, 16)}


def vision(name: str, model: str, attentions=BOTH, **config) -> None:
    add(name, "vision", made(model, num_labels=5, **config), images, hidden_losses, attentions, (False,))


VIT = {**SIZES, "image_size": 16, "patch_size": 8}
vision("ViT", "ViTForImageClassification", **VIT)
vision("DeiT", "DeiTForImageClassification", **VIT)
vision(
    "BEiT", "BeitForImageClassification", **VIT, use_relative_position_bias=True, use_absolute_position_embeddings=False
)
vision("DINOv2", "Dinov2ForImageClassification", **(SIZES | {"intermediate_size": 32}), image_size=16, patch_size=8)
vision(
    "Swin",
    "SwinForImageClassification",
    NONE,
    image_size=16,
    patch_size=2,
    embed_dim=8,
    depths=[1, 1],
    num_heads=[2, 2],
    window_size=2,
    drop_path_rate=0.0,
)
vision(
    "ConvNeXt", "ConvNextForImageClassification", NONE, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2
)
vision(
    "SegFormer",
    "SegformerForImageClassification",
    NONE,
    num_encoder_blocks=2,
    drop_path_rate=0.0,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[8, 16],
    patch_sizes=[3, 3],
    strides=[2, 2],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
)
vision(
    "ResNet (batch norm fixed)",
    "ResNetForImageClassification",
    NONE,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
)


def waves(padded: bool) -> Batch:
    batch = {"input_values": torch.randn(B, 400)}
    return batch | (
        {"attention_mask": (torch.arange(400) < torch.tensor([[400], [300], [160]])).long()} if padded else {}
    )


WAVES = {
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    **SIZES,
    "conv_dim": [8, 8],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": V,
}
add("Wav2Vec 2", "audio", made("Wav2Vec2ForCTC", **WAVES), waves, hidden_losses)
add("HuBERT", "audio", made("HubertForCTC", **WAVES), waves, hidden_losses)
add(
    "Whisper",
    "audio",
    made(
        "WhisperForConditionalGeneration",
        **IDS,
        **BART,
        num_mel_bins=4,
        max_source_positions=8,
        max_target_positions=16,
    ),
    lambda padded: {"input_features": torch.randn(B, 4, 16), "decoder_input_ids": torch.randint(3, V, (B, 6))},
    hidden_losses,
    BOTH,
    (False,),
)
add(
    "Audio Spectrogram Transformer",
    "audio",
    made(
        "ASTForAudioClassification",
        **SIZES,
        max_length=16,
        num_mel_bins=8,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
    ),
    lambda padded: {"input_values": torch.randn(B, 16, 8)},
    hidden_losses,
    BOTH,
    (False,),
)


def series(padded: bool) -> Batch:
    batch = {"past_values": torch.randn(B, 16, 2)}
    return batch | ({"past_observed_mask": torch.arange(16)[None, :, None].expand(B, 16, 2) > 2} if padded else {})


add(
    "PatchTST",
    "time series",
    made(
        "PatchTSTForPrediction",
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        prediction_length=4,
        norm_type="layernorm",
        loss="mse",
        scaling=None,
    ),
    series,
    lambda m, b: measure(m(**b).prediction_outputs),
    BOTH,
    (False,),
)
add(
    "PatchTSMixer",
    "time series",
    made(
        "PatchTSMixerForPrediction",
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=8,
        num_layers=2,
        prediction_length=4,
        loss="mse",
        scaling=None,
    ),
    series,
    lambda m, b: measure(m(**b).prediction_outputs),
    NONE,
    (False,),
)


def adapted(**options) -> Callable[[str], nn.Module]:
    """GPT-2 with adapters of peft: frozen but for them."""

    def make(attention: str) -> nn.Module:
        import peft

        # In training mode: DoRA keeps the norms of its weights in evaluation mode.
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = peft.LoraConfig(
            r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False, **options
        )
        return peft.get_peft_model(made("GPT2LMHeadModel", **IDS, **GPT, **dropout)(attention), config).train()

    return make


add("GPT-2 with LoRA", "text", adapted(), text, token_losses)
add("GPT-2 with DoRA", "text", adapted(use_dora=True), text, token_losses)


# Plain torch.


class Recurrent(nn.Module):
    """A language model on nn.LSTM, nn.GRU or nn.RNN, with a tied head."""

    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(V, 12, padding_idx=0)
        self.rnn = kind(12, 12, batch_first=True, **options)

    def forward(self, input_ids, attention_mask=None):
        return self.rnn(self.embedding(input_ids))[0] @ self.embedding.weight.T


def recurrent_losses(model: nn.Module, batch: Batch) -> Tensor:
    each = F.cross_entropy(model(**batch)[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return (each * (batch["input_ids"][:, 1:] > 0)).sum(1)


def plain(name, domain, make, batch, losses=lambda m, b: measure(m(**b)), paddings=(False,)) -> None:
    add(name, domain, lambda _: make().eval(), batch, losses, NONE, paddings)


plain(
    "LSTM, 2 layers, tied", "recurrent", lambda: Recurrent(nn.LSTM, num_layers=2), text, recurrent_losses, (False, True)
)
plain("GRU, tied", "recurrent", lambda: Recurrent(nn.GRU), text, recurrent_losses, (False, True))


class Tagger(nn.Module):
    """A tagger of words: convolutions over characters, a recurrent network in both directions."""

    def __init__(self):
        super().__init__()
        self.characters, self.conv = nn.Embedding(V, 6), nn.Conv1d(6, 8, 3, padding=1)
        self.rnn, self.tags = nn.LSTM(8, 6, bidirectional=True, batch_first=True), nn.Linear(12, 5)

    def forward(self, words):  # [B, words, characters]
        found = self.conv(self.characters(words).flatten(0, 1).transpose(1, 2)).amax(2)
        return self.tags(self.rnn(found.unflatten(0, words.shape[:2]))[0])


plain("BiLSTM tagger over characters", "recurrent", Tagger, lambda _: {"words": torch.randint(0, V, (B, 4, 5))})


class Encoder(nn.Module):
    """nn.TransformerEncoder with learned positions."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(V, 16), nn.Parameter(torch.randn(1, 32, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids) + self.positions[:, : input_ids.shape[1]]
        return self.blocks(x, src_key_padding_mask=None if attention_mask is None else attention_mask == 0)[:, 0]


plain("nn.TransformerEncoder", "text", Encoder, text, paddings=(False, True))


def block(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.PReLU(b))


class UNet(nn.Module):
    """Down by a strided convolution, up by a transposed one."""

    def __init__(self):
        super().__init__()
        self.a, self.down, self.b = block(3, 8), nn.Conv2d(8, 8, 2, stride=2), block(8, 8)
        self.up, self.c, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), block(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, pixel_values):
        a = self.a(pixel_values)
        return self.out(self.c(torch.cat([a, self.up(self.b(self.down(a)))], 1)))


plain("U-Net (group norm)", "vision", UNet, images)


class Temporal(nn.Module):
    """A temporal convolutional network: causal, dilated, weight norm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(2 if k == 0 else 8, 8, 3, dilation=2**k)) for k in range(3)
        )
        self.out = nn.Linear(8, 1)

    def forward(self, past_values):
        x = past_values.transpose(1, 2)
        for k, layer in enumerate(self.layers):
            x = F.relu(layer(F.pad(x, (2 ** (k + 1), 0))))
        return self.out(x.transpose(1, 2))


plain("Temporal convolutions (weight norm)", "time series", Temporal, series)


class Tables(nn.Module):
    """A click model: bags of ids, a bilinear product, an MLP."""

    def __init__(self):
        super().__init__()
        self.bag, self.item = nn.EmbeddingBag(V, 6, mode="mean"), nn.Embedding(V, 6)
        self.cross, self.mlp = nn.Bilinear(6, 6, 4), nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, history, item):
        user, item = self.bag(history), self.item(item)
        return self.mlp(torch.cat([user, item, self.cross(user, item)], 1))


plain(
    "Click model (EmbeddingBag, Bilinear)",
    "tables",
    Tables,
    lambda _: {"history": torch.randint(0, V, (B, 5)), "item": torch.randint(0, V, (B,))},
)


def per_sample(model: nn.Module, one: Architecture, batch: Batch) -> tuple[Tensor, list[list[Tensor]]]:
    """Norms `[B]`, and the gradients of each sample, by plain autograd on that sample alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for i in range(B):
        loss = one.losses(model, {name: x[i : i + 1] for name, x in batch.items()})
        found = torch.autograd.grad(loss[0], parameters, allow_unused=True)
        gradients.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)])
    return torch.stack([torch.stack([g.double().norm() for g in own]).norm() for own in gradients]), gradients


def error_of(one: Architecture, attention: str, padded: bool, double: bool = False) -> float:
    """The largest relative error of the norms, and of the sum with the weights of automatic clipping, in float32 or float64.

    Two passes: the second one derives gradients early, because the first has checked that samples are apart.
    """
    model, batch = one.make(attention), one.batch(padded)
    if double:
        model = model.double()
        batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    norms, gradients = per_sample(model, one, batch)
    weights = 1 / (norms + 0.01)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = [
        sum(w * own[k].double() for w, own in zip(weights, gradients, strict=True)) for k in range(len(parameters))
    ]
    size = torch.stack([x.norm() for x in wanted]).norm()
    clipping, errors = PhantomClipping(model), []
    for _ in range(2):
        for p in parameters:
            p.grad = None
        found = clipping.weighted_sum(lambda: one.losses(model, batch), weights)
        off = torch.stack([(p.grad.double() - x).norm() for p, x in zip(parameters, wanted, strict=True)]).norm()
        errors += [float((found / norms - 1).abs().max()), float(off / size)]
    return max(errors)

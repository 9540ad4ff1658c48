"""A causal Transformer for next-item prediction, with Re-Attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.models import attention, error, reattention
from dpformer.models.dropout import Dropout
from dpformer.models.network import Network, NetworkSpec
from dpformer.models.reattention import ReAttention
from dpformer.models.recommender import register


class TransformerSpec(NetworkSpec):
    """A Transformer's size and form.

    norm: "pre" normalises what goes into each layer, and the last output; "post" normalises after each residual sum, as the
    standard encoder does. recency: attention falls off with the lag as `(1 + lag)^-recency` times whatever queries and keys
    say, in place of learned positions: what is recent need not be learned under noise. identity: layers start as what does
    least, values and attention output as the identity and the feed-forward output as 0, so that the first gradients already are
    those of a model that compares the items of a history with the next one.
    """

    kind: Literal["transformer"] = "transformer"
    heads: int = Field(default=1, ge=1, le=2**14)
    blocks: int = Field(default=2, ge=1, le=256)
    feed_forward: int | None = Field(default=None, ge=1, le=2**16)
    norm: Literal["pre", "post"] = "pre"
    recency: float | None = Field(default=None, ge=0)
    identity: bool = False
    reattention: ReAttention | None = None

    @model_validator(mode="after")
    def _heads_divide_d(self) -> TransformerSpec:
        if self.d % self.heads:
            raise ValueError(f"d = {self.d} is not a multiple of heads = {self.heads}")
        return self


@register("transformer", TransformerSpec)
class Transformer(Network):
    """Blocks of causal self-attention and feed-forward layers over item and position embeddings.

    Without `set_errors` the attention is the ordinary one.
    """

    spec: TransformerSpec

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__(spec)
        d = spec.d
        self.positions = nn.Parameter(torch.randn(spec.max_length, d) * 0.02) if spec.recency is None else None
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.blocks))
        self.norm = nn.LayerNorm(d) if spec.norm == "pre" else nn.Identity()
        self.dropout = Dropout(spec.dropout)
        self.reattention = spec.reattention
        # Variances of item embeddings, position embeddings and block parameters; all zero until set.
        self.var_items: Tensor
        self.var_positions: Tensor
        self.var_blocks: Tensor
        self.register_buffer("var_items", torch.zeros(spec.rows + 1))
        self.register_buffer("var_positions", torch.zeros(spec.max_length))
        self.register_buffer("var_blocks", torch.zeros(()))

    def set_errors(self, noise_multiplier: float, batch_size: float, frequencies: Tensor, lengths: Tensor) -> None:
        """Effective errors of all parameters, from public or released quantities alone.

        frequencies `[items + 1]`: fraction of sequences that hold each item (row 0 is not read). lengths `[max_length]`: fraction
        of sequences with at least t items, for t = 1, 2, ....
        """
        if self.reattention is None:
            raise ValueError("this Transformer was made without reattention")
        if frequencies.shape != self.output_bias.shape or lengths.shape != self.var_positions.shape:
            raise ValueError(f"wanted frequencies [{self.spec.items + 1}] and lengths [{self.spec.max_length}]")
        if not bool(
            ((frequencies[1:] >= 0) & (frequencies[1:] <= 1)).all() and ((lengths >= 0) & (lengths <= 1)).all()
        ):
            raise ValueError("frequencies and lengths are fractions of all sequences, between 0 and 1")
        scale = self.reattention.scale
        if self.chosen is not None:
            frequencies = frequencies[self.chosen]
        usual = frequencies.clamp(1e-9, 1.0).index_fill(0, torch.tensor(0), 1.0)
        self.var_items.copy_(error.effective_error(noise_multiplier, batch_size, usual, scale))
        self.var_items[0] = 0
        self.var_positions.copy_(error.effective_error(noise_multiplier, batch_size, lengths.clamp(1e-9, 1.0), scale))
        self.var_blocks.copy_(error.effective_error(noise_multiplier, batch_size, 1.0, scale))

    def wants_accumulated(self) -> bool:
        """Whether `set_accumulated` is to be called after each step."""
        return self.reattention is not None and self.reattention.error == "accumulated"

    def set_accumulated(self, variances: Mapping[str, Tensor]) -> None:
        """The variance of the noise in each parameter, by its name: `[rows, 1]` of a matrix, as `Adam` tracks it."""
        assert self.reattention is not None
        scale = self.reattention.scale**2
        self.var_items.copy_(scale * variances["embedding.weight"].mean(1)).index_fill_(0, torch.tensor(0), 0.0)
        if self.positions is not None:
            self.var_positions.copy_(scale * variances["positions"].mean(1))
        of_blocks = [var.mean() for name, var in variances.items() if name.startswith("blocks.") and var.dim() == 2]
        self.var_blocks.copy_(scale * torch.stack(of_blocks).mean())

    def tracks_errors(self) -> bool:
        """Whether attention is corrected now. Without noise there is nothing to correct, and it is ordinary to the last bit.

        A graph cannot ask a tensor: there it is corrected, by nothing if there is no noise.
        """
        return self.reattention is not None and (torch.compiler.is_compiling() or bool(self.var_blocks > 0))

    def states(self, rows: Tensor) -> Tensor:
        return self.trace(rows)[-1].x

    def attention(self, rows: Tensor) -> list[Tensor]:
        states, bias = self.trace(rows), self._bias(rows)
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return [
            block.scores(state, self.reattention, self.var_blocks, bias)
            for block, state in zip(blocks, states[:-1], strict=True)
        ]

    @torch.no_grad()
    def attention_maps(self, history: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Of plain attention, and of the corrected one where there is a correction on the logits."""
        rows, _ = self.locate(history)
        kept, maps = self.reattention, {}
        try:
            if kept is not None and kept.correction == "logits" and self.tracks_errors():
                maps["with Re-Attention"] = self.attention(rows)
            self.reattention = None
            maps["plain attention"] = self.attention(rows)
        finally:
            self.reattention = kept
        return rows if self.chosen is None else self.chosen[rows], maps

    def _bias(self, rows: Tensor) -> Tensor | None:
        if self.spec.recency is None:
            return None
        with error.aside():
            return attention.recency_bias(rows.shape[1], self.spec.recency).to(self.embedding.weight)

    def trace(self, rows: Tensor) -> list[State]:
        """The state before each block and at the end (normalised): hidden states, and variances if they are tracked."""
        L = rows.shape[1]
        if self.spec.max_length < L:
            raise ValueError(
                f"sequences of {L} items are longer than max_length = {self.spec.max_length}; give the last ones"
            )
        x = self.embedding(rows) if self.positions is None else self.embedding(rows) + self.positions[:L]
        x = self.dropout(x)
        var = self.var_items[rows] if self.tracks_errors() else None
        if var is not None and self.positions is not None:
            var = var + self.var_positions[:L]
        states, bias = [State(x, var)], self._bias(rows)
        for k, block in enumerate(self.blocks):
            states.append(block(states[-1], self.reattention, self.var_blocks, bias, last=k == len(self.blocks) - 1))
        states[-1] = State(self.norm(states[-1].x), states[-1].var)
        return states


@dataclass(frozen=True)
class State:
    """Hidden states `[B, L, d]` and the variance of their coordinates `[B, L]`, None where it is not tracked."""

    x: Tensor
    var: Tensor | None


class Block(nn.Module):
    """Attention and feed-forward layers, each with a residual connection."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        d, feed_forward = spec.d, spec.feed_forward or spec.d
        self.heads, self.pre = spec.heads, spec.norm == "pre"
        self.dropout = Dropout(spec.dropout)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        q, k, v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, feed_forward), nn.Linear(feed_forward, d)
        if spec.identity:
            for layer in (v, self.o):
                nn.init.eye_(layer.weight)
            nn.init.zeros_(self.down.weight)
            for layer in (v, self.o, self.down):
                nn.init.zeros_(layer.bias)
        # Queries, keys and values by one layer: one product, one gradient and one norm in place of three.
        self.qkv = _joined(q, k, v)

    def forward(self, state: State, r: ReAttention | None, var_w: Tensor, bias: Tensor | None, last: bool) -> State:
        """One block, and the variance after it (eq:nonprop).

        `bias` is added to the logits of attention, `var_w` is the variance of the block's parameters.
        The `last` block's output variance is of no use.
        """
        x, var = state.x, state.var
        h = self.norm1(x) if self.pre else x
        mixed, var_mixed = self._attend(h, _normed(self.norm1, x, var) if self.pre else var, r, var_w, bias, last)
        x, var = x + self.dropout(mixed), _sum(var, var_mixed)
        if not self.pre:
            x, var = self.norm1(x), _normed(self.norm1, x, var)
        h = self.norm2(x) if self.pre else x
        if last:
            var = None
        fed, var_fed = self._feed(h, _normed(self.norm2, x, var) if self.pre else var, var_w)
        x, var = x + self.dropout(fed), _sum(var, var_fed)
        return State(x, var) if self.pre else State(self.norm2(x), _normed(self.norm2, x, var))

    @torch.no_grad()
    def scores(self, state: State, r: ReAttention | None, var_w: Tensor, bias: Tensor | None) -> Tensor:
        """The attention matrix of this block, `[B, heads, L, L]`, corrected on the logits where `r` says so."""
        h = self.norm1(state.x) if self.pre else state.x
        var = _normed(self.norm1, state.x, state.var) if self.pre else state.var
        q, k, _ = self._split(self.qkv(h)).unbind(2)
        if var is not None and r is not None and r.correction == "logits":
            var_k, _ = self._propagate(h, var, var_w)
            q, k = reattention.with_penalty(q, k, reattention.penalty(q, var_k, r.cap))
        return attention.scores(q, k, h.shape[-1] // self.heads, bias)

    def _attend(
        self, h: Tensor, var: Tensor | None, r: ReAttention | None, var_w: Tensor, bias: Tensor | None, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        qkv = self._split(self.qkv(h))
        if var is None or r is None:
            return self.o(self._join(attention.attend(qkv, bias))), None
        with error.aside():
            var_k, var_values = self._propagate(h, var, var_w)
        var_v = None if last else var_values
        if r.correction == "logits":
            out, var_out = reattention.attend_corrected(qkv, var_k, var_v, r.cap, bias)
        else:
            q, k, v = qkv.unbind(2)
            if r.correction == "literal":
                out = reattention.literal_attend(q, k, v, var_k, r.cap, bias)
            else:
                out = attention.attend(qkv, bias)
            with error.aside():
                var_out = None if var_v is None else reattention.output_error(q, k, var_v, bias, v.shape[-1])
        joined = self._join(out)
        if var_out is None:
            return self.o(joined), None
        with error.aside():
            # One number a token: the mean over heads.
            var_out = error.linear(var_out.mean(1), joined, self.o.weight, var_w)
        return self.o(joined), var_out

    def _feed(self, h: Tensor, var: Tensor | None, var_w: Tensor) -> tuple[Tensor, Tensor | None]:
        c = self.up(h)
        a = F.relu(c)
        if var is not None:
            with error.aside():
                var = error.relu(error.linear(var, h, self.up.weight, var_w), c)
                var = error.linear(var, a, self.down.weight, var_w)
        return self.down(a), var

    def _propagate(self, h: Tensor, var: Tensor, var_w: Tensor) -> tuple[Tensor, Tensor]:
        """The variances of the keys and of the values of each head, `[B, heads, L]` each."""
        weight = self.qkv.weight.view(3, 1, self.heads, 1, -1, self.qkv.in_features)[1:]  # without the queries'
        var_k, var_v = error.linear(var[:, None], h[:, None], weight, var_w).unbind()
        return var_k, var_v

    def _split(self, x: Tensor) -> Tensor:
        """`[B, L, 3 d]` to `[B, heads, 3, L, d / heads]`."""
        B, L, d = x.shape
        return x.view(B, L, 3, self.heads, d // (3 * self.heads)).permute(0, 3, 2, 1, 4)

    def _join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


def _joined(*layers: nn.Linear) -> nn.Linear:
    """One layer with all their outputs, in order."""
    first = layers[0]
    first.weight, first.bias = (
        nn.Parameter(torch.cat([getattr(layer, name).detach() for layer in layers])) for name in ("weight", "bias")
    )
    first.out_features = len(first.weight)
    return first


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return None
    with error.aside():
        return a + b


def _normed(norm: nn.LayerNorm, x: Tensor, var: Tensor | None) -> Tensor | None:
    if var is None:
        return None
    with error.aside():
        return error.layer_norm(var, x, norm.weight, norm.eps)

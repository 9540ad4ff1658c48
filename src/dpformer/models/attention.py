"""Causal attention with Re-Attention's correction as one more coordinate of queries and keys.

The correction takes `left_i right_j` off the logit of query i and key j. That is an inner product too, so with

    q' = (q, -sqrt(d) left)      k' = (k, right)      <q', k'> / sqrt(d) = <q, k> / sqrt(d) - left right

an attention kernel that knows nothing of it computes corrected attention, without the matrix of logits in memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.models import error

# Entries of attention matrices that are made at a time, and their rows: of keys after these there is nothing to compute.
MATRIX, ROWS = 2**18, 64


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    penalty: tuple[Tensor, Tensor] | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal attention of q, k, v `[B, heads, L, d]`; the penalty's factors are `[B, heads, L]` each.

    q and k may have the penalty already, as one more coordinate: see `widen`.
    bias: fixed and added to the logits, `[L, L]`, -inf for keys after the query (see `recency_bias`).
    """
    mask = {"is_causal": True} if bias is None else {"attn_mask": bias}
    d = v.shape[-1]
    if penalty is not None:
        q, k = with_penalty(q, k, penalty, d)
    if q.shape[-1] == d:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **mask)
    # The quick kernels want values as wide as keys.
    out = F.scaled_dot_product_attention(
        q,
        k,
        F.pad(v, (0, 1)),
        dropout_p=dropout,
        scale=1 / math.sqrt(d),
        **mask,
    )
    return out[..., :d].contiguous()


def recency_bias(length: int, power: float) -> Tensor:
    """`-power log(1 + lag)`, -inf for the future: `[L, L]`. Without queries, the key k back gets a weight of `(1 + k)^-power`.

    >>> recency_bias(3, 1.0).exp()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 1.0000, 0.0000],
            [0.3333, 0.5000, 1.0000]])
    """
    lag = torch.arange(length)[:, None] - torch.arange(length)
    return (-power * lag.clamp_min(0).to(torch.get_default_dtype()).log1p()).masked_fill(lag < 0, -torch.inf)


def with_penalty(q: Tensor, k: Tensor, penalty: tuple[Tensor, Tensor], d: int) -> tuple[Tensor, Tensor]:
    """Queries and keys with the penalty as one more coordinate, `[B, heads, L, d + 1]`."""
    left, right = penalty
    return torch.cat([q, -math.sqrt(d) * left[..., None]], -1), torch.cat([k, right[..., None]], -1)


def widen(q: Tensor, k: Tensor, var_key: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """`with_penalty(q, k, error.penalty(q, var_key, cap))`, with a gradient at q that is one pass over it and not five."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return with_penalty(q, k, error.penalty(q, var_key, cap), q.shape[-1])
    left, right = error.penalty(q.detach(), var_key, cap)
    return _Query.apply(q, left), torch.cat([k, right[..., None]], -1)


class _Query(torch.autograd.Function):
    """`(q, -sqrt(d) left)`, where left is `|q|^2 / (2 d)` or a cap below it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, left: Tensor) -> Tensor:
        d = q.shape[-1]
        wide = q.new_empty(*q.shape[:-1], d + 1)
        wide[..., :d] = q
        wide[..., d] = left * -math.sqrt(d)
        ctx.save_for_backward(q, left)
        return wide

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        q, left = ctx.saved_tensors
        d = q.shape[-1]
        # The gradient of |q|^2 / (2 d) is q / d; a cap has none.
        capped = left < error.squared_lengths(q) / (2 * d)
        factor = (gradient[..., d] * (-math.sqrt(d) / d)).masked_fill(capped, 0)
        return torch.addcmul(gradient[..., :d], factor[..., None], q), None


def causal(length: int, like: Tensor) -> Tensor:
    """0 for keys up to the query, -inf after it: `[L, L]`."""
    return torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device).triu(1)


def scores(
    q: Tensor,
    k: Tensor,
    penalty: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    d: int | None = None,
) -> Tensor:
    """The attention matrix itself, `[B, heads, L, L]`: for error tracking, diagnostics and as the explicit form.

    d: the width of queries, where they have the penalty already.
    """
    d = d or q.shape[-1]
    if penalty is not None:
        q, k = with_penalty(q, k, penalty, d)
    if bias is None:
        bias = causal(q.shape[-2], q)
    logits = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=1 / math.sqrt(d))
    return logits.view(*q.shape[:-1], k.shape[-2]).softmax(-1)


def output_error(q: Tensor, k: Tensor, var_values: Tensor, bias: Tensor | None, d: int) -> Tensor:
    """The variance of attention's output, `[B, heads, L]`, from that of the values, of the same shape; q, k: as in `attend`.

    It needs the attention matrix, but only some rows of some samples' at a time, as many as a processor's own cache has room for.
    """
    L = q.shape[-2]
    step = ROWS if q.device.type == "cpu" and not torch.compiler.is_compiling() else L
    bias = causal(L, q) if bias is None else bias
    found = []
    for first in range(0, L, max(1, step)):
        last = min(first + step, L)

        def of_some(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = bias[first:last, :last]) -> Tensor:
            return error.attention_output(v, scores(q, k, None, mask, d))

        size = MATRIX // max(1, q.shape[1] * (last - first) * last)
        parts = q[..., first:last, :], k[..., :last, :], var_values[..., :last]
        found.append(error.in_parts(of_some, size, *parts))
    return torch.cat(found, -1) if found else torch.zeros_like(var_values)


def literal_attend(
    q: Tensor, k: Tensor, v: Tensor, var_key: Tensor, cap: float | None, bias: Tensor | None = None
) -> Tensor:
    """The paper's correction to the letter: scores divided by `exp(<q, q> var / 2)` after the softmax, no renormalisation.

    The exponent is capped, if there is a cap, since it overflows for rare tokens.
    """
    exponent = q.square().sum(-1)[..., None] * var_key[..., None, :] / 2
    if cap is not None:
        exponent = exponent.clamp_max(cap)
    return (scores(q, k, bias=bias) * torch.exp(-exponent)) @ v

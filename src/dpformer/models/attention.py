"""Causal attention with Re-Attention's correction as one more coordinate of queries and keys.

The correction takes `left_i right_j` off the logit of query i and key j. That is an inner product too, so with

    q' = (q, -sqrt(d) left)      k' = (k, right)      <q', k'> / sqrt(d) = <q, k> / sqrt(d) - left right

an attention kernel that knows nothing of it computes corrected attention, without the matrix of logits in memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.models import error

# Entries of attention matrices that are made at a time.
MATRIX = 2**18


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    penalty: tuple[Tensor, Tensor] | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal attention of q, k, v `[B, heads, L, d]`; the penalty's factors are `[B, heads, L]` each.

    bias: fixed and added to the logits, `[L, L]`, -inf for keys after the query (see `recency_bias`).
    """
    mask = {"is_causal": True} if bias is None else {"attn_mask": bias}
    if penalty is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **mask)
    d = q.shape[-1]
    q, k = with_penalty(q, k, penalty, d)
    # The quick kernels want values as wide as keys.
    out = F.scaled_dot_product_attention(
        q,
        k,
        F.pad(v, (0, 1)),
        dropout_p=dropout,
        scale=1 / math.sqrt(d),
        **mask,
    )
    return out[..., :d]


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


def scores(q: Tensor, k: Tensor, penalty: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None) -> Tensor:
    """The attention matrix itself, `[B, heads, L, L]`: for error tracking, diagnostics and as the explicit form."""
    d = q.shape[-1]
    if penalty is not None:
        q, k = with_penalty(q, k, penalty, d)
    if bias is None:
        bias = torch.full((q.shape[-2], q.shape[-2]), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    logits = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=1 / math.sqrt(d))
    return logits.view(*q.shape[:-1], k.shape[-2]).softmax(-1)


def output_error(
    q: Tensor, k: Tensor, var_values: Tensor, penalty: tuple[Tensor, Tensor] | None, bias: Tensor | None
) -> Tensor:
    """The variance of attention's output, `[B, heads, L]`, from that of the values, of the same shape.

    It needs the attention matrix, but only some samples' at a time, as many as a processor's own cache has room for.
    """

    def of_some(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
        return error.attention_output(v, scores(q, k, (factors[0], factors[1]) if factors else None, bias))

    size = MATRIX // max(1, q.shape[1] * q.shape[2] ** 2)
    return error.in_parts(of_some, size, q, k, var_values, *(penalty or ()))


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

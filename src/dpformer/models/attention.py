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


def attend(
    q: Tensor, k: Tensor, v: Tensor, penalty: tuple[Tensor, Tensor] | None = None, dropout: float = 0.0
) -> Tensor:
    """Causal attention of q, k, v `[B, heads, L, d]`; the penalty's factors are `[B, heads, L]` each."""
    if penalty is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    d = q.shape[-1]
    q, k = with_penalty(q, k, penalty, d)
    # The quick kernels want values as wide as keys.
    out = F.scaled_dot_product_attention(
        q, k, F.pad(v, (0, 1)), dropout_p=dropout, is_causal=True, scale=1 / math.sqrt(d)
    )
    return out[..., :d]


def with_penalty(q: Tensor, k: Tensor, penalty: tuple[Tensor, Tensor], d: int) -> tuple[Tensor, Tensor]:
    """Queries and keys with the penalty as one more coordinate, `[B, heads, L, d + 1]`."""
    left, right = penalty
    return torch.cat([q, -math.sqrt(d) * left[..., None]], -1), torch.cat([k, right[..., None]], -1)


def scores(q: Tensor, k: Tensor, penalty: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The attention matrix itself, `[B, heads, L, L]`: for error tracking, diagnostics and as the explicit form."""
    d = q.shape[-1]
    if penalty is not None:
        q, k = with_penalty(q, k, penalty, d)
    future = torch.full((q.shape[-2], q.shape[-2]), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    logits = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=1 / math.sqrt(d))
    return logits.view(*q.shape[:-1], k.shape[-2]).softmax(-1)


def literal_attend(q: Tensor, k: Tensor, v: Tensor, var_key: Tensor, cap: float | None) -> Tensor:
    """The paper's correction to the letter: scores divided by `exp(<q, q> var / 2)` after the softmax, no renormalisation.

    The exponent is capped, if there is a cap, since it overflows for rare tokens.
    """
    exponent = q.square().sum(-1)[..., None] * var_key[..., None, :] / 2
    if cap is not None:
        exponent = exponent.clamp_max(cap)
    return (scores(q, k) * torch.exp(-exponent)) @ v

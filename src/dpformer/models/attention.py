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
    left, right = penalty
    d = q.shape[-1]
    q = torch.cat([q, -math.sqrt(d) * left[..., None]], -1)
    k = torch.cat([k, right[..., None]], -1)
    # The quick kernels want values as wide as keys.
    out = F.scaled_dot_product_attention(
        q, k, F.pad(v, (0, 1)), dropout_p=dropout, is_causal=True, scale=1 / math.sqrt(d)
    )
    return out[..., :d]


def scores(q: Tensor, k: Tensor, penalty: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The attention matrix itself, `[B, heads, L, L]`: for error tracking, diagnostics and as the explicit form."""
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if penalty is not None:
        logits = logits - penalty[0][..., None] * penalty[1][..., None, :]
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return logits.masked_fill(future, -torch.inf).softmax(-1)


def literal_attend(q: Tensor, k: Tensor, v: Tensor, var_key: Tensor, cap: float | None) -> Tensor:
    """The paper's correction to the letter: scores divided by `exp(<q, q> var / 2)` after the softmax, no renormalisation.

    The exponent is capped, if there is a cap, since it overflows for rare tokens.
    """
    exponent = q.square().sum(-1)[..., None] * var_key[..., None, :] / 2
    if cap is not None:
        exponent = exponent.clamp_max(cap)
    return (scores(q, k) * torch.exp(-exponent)) @ v

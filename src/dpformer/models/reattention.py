"""Re-Attention: attention corrected for the noise on its keys.

The paper, eq:reattnbias: a key with variance s^2 makes the expected score of its token too large by a factor,

    E[S_i] = exp(<q, k_i> - M) exp(<q, q> s_i^2 / 2)        and the paper divides scores by it, after the softmax (`literal`).

The printed formula omits the 1 / sqrt(d) of attention, and divided scores no longer sum to 1. Ours takes the factor off before
the softmax, with d the width of a head:

    logit_ij = <q_i, k_j> / sqrt(d)  -  <q_i, q_i> / (2 d) var_j

The penalty is a product of a number per query and a number per key, `left_i right_j`, so it is an inner product too. With

    q' = (q, -sqrt(d) left)      k' = (k, right)      <q', k'> / sqrt(d) = <q, k> / sqrt(d) - left right

corrected attention is ordinary attention of one more coordinate, for any kernel.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from dpformer.models import attention, error


@dataclass(frozen=True)
class ReAttention:
    """How attention is corrected for the noise on its keys.

    correction      "logits" (ours), "literal" (the paper's formula), "none" (errors are tracked and not used: an ablation)
    cap             largest correction within a row, in nats; None for no cap
    scale           factor on all standard deviations
    error           "paper" (the noise of one step over the frequency) or "accumulated" (of all steps, as the optimizer tracks it)
    """

    correction: Literal["logits", "literal", "none"] = "logits"
    cap: float | None = Field(default=5.0, gt=0)
    scale: float = Field(default=1.0, ge=0)
    error: Literal["paper", "accumulated"] = "paper"


def penalty(query: Tensor, var_key: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """What is taken off the logits, as two factors: `penalty_ij = left_i right_j`, each `[..., L]`.

    A key with variance v makes the expected score of its token too large by the factor `exp(|q|^2 v / (2 d_head))`; in logits,
    `|q_i|^2 / (2 d_head) * v_j`. query `[..., L, d_head]`, var_key `[..., L]`.

    Only differences within a row matter to the softmax, so `right` is relative to the first key, which every row of causal
    attention has. For rare tokens differences can be beyond any float: with a `cap` (in nats) each row is scaled down, as a
    whole, so that its largest difference among the keys up to it is at most the cap. (Cutting single entries would do too, but
    is not a product of two factors, and a product is what lets `scaled_dot_product_attention` apply it as it is.)

    >>> left, right = penalty(torch.ones(2, 4), torch.tensor([0.1, 0.3]), cap=None)  # |q|^2 / (2 d) = 1/2
    >>> left[:, None] * right
    tensor([[0.0000, 0.1000],
            [0.0000, 0.1000]])
    >>> left, right = penalty(torch.ones(2, 4), torch.tensor([1e30, 1.0]), cap=5.0)
    >>> left[1] * right
    tensor([ 0., -5.])
    """
    return limited(error.squared_lengths(query) / (2 * query.shape[-1]), var_key, cap)


def limited(left: Tensor, var_key: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """`penalty`, from `|q|^2 / (2 d_head)` `[..., L]`."""
    right = var_key - var_key[..., :1]
    if cap is not None:
        spread = right.cummax(-1).values - right.cummin(-1).values
        left = torch.minimum(left, cap / spread.clamp_min(torch.finfo(spread.dtype).tiny))
    return left, right


def with_penalty(q: Tensor, k: Tensor, penalty: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries and keys `[B, heads, L, d]` with the penalty as one more coordinate, `[B, heads, L, d + 1]`."""
    left, right = penalty
    return torch.cat([q, -math.sqrt(q.shape[-1]) * left[..., None]], -1), torch.cat([k, right[..., None]], -1)


def attend_corrected(
    qkv: Tensor, var_key: Tensor, var_value: Tensor | None, cap: float | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`attention.attend` less the penalty for keys of variance `var_key` `[B, heads, L]`.

    Returns the output and, from `var_value` `[B, heads, L]`, its variance `[B, heads, L]`. The gradient goes through q into the
    penalty too; through variances it does not.
    """
    if attention.by_rows(qkv):
        with error.aside():
            whole = error.squared_lengths(qkv[:, :, 0]) / (2 * qkv.shape[-1])
            left, right = limited(whole, var_key, cap)
            capped = left < whole
        return attention.attend_rows(qkv, bias, (left, right, capped), var_value)
    q, k, v = qkv.unbind(2)
    q, k = with_penalty(q, k, penalty(q, var_key, cap))
    out = attention.kernel(q, k, v, bias)
    with error.aside():
        return out, None if var_value is None else output_error(q, k, var_value, bias, v.shape[-1])


def output_error(q: Tensor, k: Tensor, var_values: Tensor, bias: Tensor | None, d: int) -> Tensor:
    """The variance of attention's output, `[B, heads, L]`, from that of the values, of the same shape; q, k: as in `kernel`.

    It needs the attention matrix, but only some rows of some samples' at a time, as many as a processor's own cache has room for.
    """
    L = q.shape[-2]
    step = attention.ROWS if q.device.type == "cpu" and not torch.compiler.is_compiling() else L
    bias = attention.causal(L, q) if bias is None else bias
    parts = []
    for rows, keys in attention.row_slices(L, step):

        def of_some(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = bias[rows, keys]) -> Tensor:
            return error.attention_output(v, attention.scores(q, k, d, mask))

        size = attention.MATRIX // max(1, q.shape[1] * (rows.stop - rows.start) * keys.stop)
        parts.append(error.in_parts(of_some, size, q[..., rows, :], k[..., keys, :], var_values[..., keys]))
    return torch.cat(parts, -1) if parts else torch.zeros_like(var_values)


def literal_attend(
    q: Tensor, k: Tensor, v: Tensor, var_key: Tensor, cap: float | None, bias: Tensor | None = None
) -> Tensor:
    """The paper's correction to the letter: scores divided by `exp(<q, q> var / 2)` after the softmax, no renormalisation.

    The exponent is capped, if there is a cap, since it overflows for rare tokens.
    """
    exponent = q.square().sum(-1)[..., None] * var_key[..., None, :] / 2
    if cap is not None:
        exponent = exponent.clamp_max(cap)
    return (attention.scores(q, k, q.shape[-1], bias) * torch.exp(-exponent)) @ v

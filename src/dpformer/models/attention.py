"""Kernels of causal attention.

In training on a CPU the attention matrix is computed some rows at a time and kept for the gradient. That is faster than
`scaled_dot_product_attention`, which computes it again, and a penalty on the logits and the variance of the output are passes
over rows that are in the processor's cache. Elsewhere (on a GPU, under autocast, for very long sequences, when a graph is
traced, and without gradients) torch's kernel is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Entries and rows of attention matrices that are computed at a time. For keys after these rows there is nothing to compute.
MATRIX, ROWS = 2**19, 64
# Largest heads * length for which attention matrices are kept for the gradient: this many numbers per token.
LONGEST = 512


def attend(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal attention `[B, heads, L, d]` of queries, keys and values `[B, heads, 3, L, d]`.

    bias: fixed and added to the logits, `[L, L]`, -inf for keys after the query (see `recency_bias`).
    """
    if by_rows(qkv):
        return attend_rows(qkv, bias)[0]
    q, k, v = qkv.unbind(2)
    return kernel(q, k, v, bias)


def kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """`attend` by torch; q and k `[B, heads, L, d]` may have one more coordinate than v (see `reattention.with_penalty`)."""
    mask = {"is_causal": True} if bias is None else {"attn_mask": bias}
    d = v.shape[-1]
    if q.shape[-1] == d:
        return F.scaled_dot_product_attention(q, k, v, **mask)
    # The fast kernels need values as wide as keys.
    out = F.scaled_dot_product_attention(
        q,
        k,
        F.pad(v, (0, 1)),
        scale=1 / math.sqrt(d),
        **mask,
    )
    return out[..., :d].contiguous()


def by_rows(qkv: Tensor) -> bool:
    """Whether attention of `[B, heads, 3, L, d]` is computed some rows at a time."""
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return False  # tracing and torch.func need functions of torch alone
    return qkv.device.type == "cpu" and qkv.shape[1] * qkv.shape[3] <= LONGEST


def attend_rows(
    qkv: Tensor,
    bias: Tensor | None = None,
    penalty: tuple[Tensor, Tensor, Tensor] | None = None,
    var_value: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`attend` some rows at a time, less a penalty: `left`, `right` and `capped` of `_Rows`, `[B, heads, L]` each.

    Returns the output and, from the variance of the values `[B, heads, L]`, its variance.
    """
    shape = (*qkv.shape[:2], *qkv.shape[3:])
    with torch._C.DisableTorchFunction():  # a recorder, as clipping has one, would find no parameter in there
        left, right, capped = (None,) * 3 if penalty is None else (part.flatten(0, 1) for part in penalty)
        var_value = None if var_value is None else var_value.flatten(0, 1)
        out, var = _Rows.apply(qkv.flatten(0, 1), left, right, capped, var_value, bias)
        return out.view(shape), None if var is None else var.view(shape[:-1])


class _Rows(torch.autograd.Function):
    """Attention of q, k, v `[n, 3, L, d]` less `left right`, `[n, L]` each, and its variance from that of the values `[n, L]`.

        S = softmax(q k' / sqrt(d) - left right + bias)        out = S v        var = S^2 var_value

    left is `|q|^2 / (2 d)`, whose gradient is `q / d`, or less where it is `capped`, and has none. All are None for no penalty.
    """

    samples_first = True  # each element of the first dimension alone: the clipping guard trusts it

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        capped: Tensor | None,
        var_value: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = qkv.unbind(1)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        var = None if var_value is None else torch.empty_like(var_value)
        scale = 1 / math.sqrt(q.shape[-1])
        step = _step(q.shape[1])
        pieces = list(row_slices(q.shape[1], step))[::-1]  # as the gradient wants them
        future = causal(min(step, q.shape[1]), q)
        nothing = q.new_empty(1)
        kept = []
        columns = (None if x is None else x[..., None] for x in (left, var_value, var))
        some = _some(step, q, k, v, out, None if right is None else right[:, None], *columns)
        for q_, k_, v_, out_, right_, left_, var_value_, var_ in some:
            for rows, keys in pieces:
                # At beta 0 the first argument is not read.
                S = torch.baddbmm(nothing, q_[:, rows], k_[:, keys].transpose(1, 2), beta=0, alpha=scale)
                if left_ is not None:
                    S.addcmul_(left_[:, rows], right_[..., keys], value=-1)
                if bias is None:
                    count = rows.stop - rows.start
                    S[..., rows].add_(future[:count, :count])
                else:
                    S.add_(bias[rows, keys])
                torch.softmax(S, -1, out=S)
                out_[:, rows] = torch.bmm(S, v_[:, keys])
                if var_ is not None:
                    var_[:, rows] = torch.bmm(S.square(), var_value_[:, keys])
                kept.append(S)
        ctx.save_for_backward(qkv, right, capped, *kept)
        if var is not None:
            ctx.mark_non_differentiable(var)
        return out, var

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("attention has no second derivatives here")
        qkv, right, capped, *kept = ctx.saved_tensors
        q, k, v = qkv.unbind(1)
        d = q.shape[-1]
        scale = 1 / math.sqrt(d)
        # As it lies, so that it need not be copied for the layer that all three came from.
        at_qkv = torch.empty_like(qkv)
        at_q, at_k, at_v = at_qkv.unbind(1)
        at_left = None if right is None else torch.empty_like(right)
        columns = (None if x is None else x[..., None] for x in (right, at_left))
        step = _step(q.shape[1])
        # The last rows first: they have all keys, so that nothing has to be 0 to be added to.
        pieces = list(row_slices(q.shape[1], step))[::-1]
        matrices = iter(kept)
        for q_, k_, v_, gradient_, at_q_, at_k_, at_v_, right_, at_left_ in _some(
            step, q, k, v, gradient, at_q, at_k, at_v, *columns
        ):
            for rows, keys in pieces:
                S, at_out = next(matrices), gradient_[:, rows]
                _add(at_v_, keys, S.transpose(1, 2), at_out)
                at_S = torch.bmm(at_out, v_[:, keys].transpose(1, 2))
                at_logits = torch._softmax_backward_data(at_S, S, -1, S.dtype, grad_input=at_S)
                at_q_[:, rows] = torch.bmm(at_logits, k_[:, keys])
                _add(at_k_, keys, at_logits.transpose(1, 2), q_[:, rows])
                if at_left_ is not None:
                    at_left_[:, rows] = torch.bmm(at_logits, right_[:, keys])
        at_qkv[:, :2].mul_(scale)
        if capped is not None and at_left is not None:
            at_q.addcmul_(at_left.mul_(-1 / d).masked_fill_(capped, 0)[..., None], q)
        return at_qkv, None, None, None, None, None


def _add(out: Tensor, keys: slice, a: Tensor, b: Tensor) -> None:
    """Write `a b` to `out` `[n, L, d]` for all keys, or add it for the first ones."""
    # In place it would be a product for each of n, which is slower.
    product = torch.bmm(a, b)
    if keys.stop == out.shape[1]:
        out.copy_(product)
    else:
        out[:, keys] += product


def _step(L: int) -> int:
    """How many rows of an attention matrix are made at a time: about the same each time, and whole registers."""
    count = -(-L // ROWS)
    return -(-L // max(1, 8 * count)) * 8


def _some(step: int, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """The tensors, the first of them `[n, L, d]`, for some of n at a time: for so many attention matrices that fit the cache,
    of which `step` rows are made at a time.
    """
    assert tensors[0] is not None
    n, L = tensors[0].shape[:2]
    size = max(1, MATRIX // max(1, min(step, L) * L))
    nothing = (None,) * max(1, -(-n // size))  # as many as `split` makes, of which there is one even of nothing
    return zip(*(nothing if tensor is None else tensor.split(size) for tensor in tensors), strict=True)


def row_slices(L: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Rows of an attention matrix `[L, L]`, some at a time, and the keys up to the last of them."""
    for first in range(0, L, max(1, step)):
        last = min(first + step, L)
        yield slice(first, last), slice(last)


def recency_bias(length: int, power: float) -> Tensor:
    """`-power log(1 + lag)`, -inf for the future: `[L, L]`. Without queries, the key k back gets a weight of `(1 + k)^-power`.

    >>> recency_bias(3, 1.0).exp()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 1.0000, 0.0000],
            [0.3333, 0.5000, 1.0000]])
    """
    lag = torch.arange(length)[:, None] - torch.arange(length)
    return (-power * lag.clamp_min(0).to(torch.get_default_dtype()).log1p()).masked_fill(lag < 0, -torch.inf)


def causal(length: int, like: Tensor) -> Tensor:
    """0 for keys up to the query, -inf after it: `[L, L]`."""
    return torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device).triu(1)


def scores(q: Tensor, k: Tensor, d: int, bias: Tensor | None = None) -> Tensor:
    """The attention matrix itself, `[B, heads, L, L]`: for error tracking, diagnostics and as the explicit form.

    q and k: as in `kernel`; d: their width without a penalty.
    """
    if bias is None:
        bias = causal(q.shape[-2], q)
    logits = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=1 / math.sqrt(d))
    return logits.view(*q.shape[:-1], k.shape[-2]).softmax(-1)

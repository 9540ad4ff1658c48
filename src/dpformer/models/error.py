"""Effective error and its propagation: the variance that privacy noise leaves on each token, one number per token.

Pure functions on means and variances, usable without any model. Noise is isotropic, so a vector's error is one variance per
coordinate, the same for all of its coordinates; what layers do to it is averaged over coordinates. One function per rule, with
the paper's equation by its label, as printed, where ours differs. Every rule is compared with sampling in `test_error.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def aside() -> contextlib.AbstractContextManager[Any]:
    """Run a block without gradients and unseen by recorders of a forward pass, which would take as long again for it."""
    return torch.no_grad() if torch.compiler.is_compiling() else _Aside()


class _Aside:
    def __enter__(self) -> None:
        self._unseen = torch._C.DisableTorchFunction()
        self._unseen.__enter__()
        self._enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: Any) -> None:
        torch._C._set_grad_enabled(self._enabled)
        self._unseen.__exit__(*raised)


def effective_error(
    noise_multiplier: float, batch_size: float, frequency: Tensor | float = 1.0, scale: float = 1.0
) -> Tensor:
    """Variance of a parameter's coordinates, eq:effectiveerror: `(scale sigma / (B p))^2`, p the share of sequences with it.

    The paper takes `sigma / (B p)` as a standard deviation. It is a relative error; `scale` adjusts it.

    >>> effective_error(2.0, 100.0, torch.tensor([1.0, 0.1])).sqrt()
    tensor([0.0200, 0.2000])
    """
    return (scale * noise_multiplier / (batch_size * torch.as_tensor(frequency))).square()


def linear(var: Tensor, x: Tensor, weight: Tensor, var_weight: Tensor | float) -> Tensor:
    """`y = x W'`: var `[...]`, x `[..., d_in]`, W `[..., d_out, d_in]` to the variance of y's coordinates, `[...]`.

        Var y = Var x |W|^2 / d_out  +  Var W (d_in Var x + |x|^2)

    Exact for independent, isotropic errors. As printed, eq:linearnpn has no sum over the inputs (and `l` for `l - 1`):
    `Var y = Var x Var W + Var x W^2 + Var W x^2`.

    >>> linear(torch.tensor(0.5), torch.tensor([3.0, 4.0]), torch.eye(2), 0.1)  # 0.5 * 2/2 + 0.1 * (2 * 0.5 + 25)
    tensor(3.1000)
    """
    gain = weight.square().sum((-2, -1)) / weight.shape[-2]
    return var * (gain + var_weight * x.shape[-1]) + var_weight * squared_lengths(x)


def squared_lengths(x: Tensor) -> Tensor:
    """`|x|^2` over the last dimension, in one pass without a copy."""
    return torch.linalg.vector_norm(x, dim=-1).square()


def relu_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of `max(0, X)`, X normal with this mean c and variance d; elementwise.

        m = c Phi(c / sqrt d) + sqrt d phi(c / sqrt d)        Var = (c^2 + d) Phi + c sqrt d phi - m^2

    As printed, eq:relunpn subtracts c^2 in place of m^2, and is negative for c < 0. Ours gives the paper's own table, whose
    second argument is a standard deviation.

    For a standard normal they are `1 / sqrt(2 pi)` and `1/2 - 1 / (2 pi)`:

    >>> relu_moments(torch.tensor(0.0), torch.tensor(1.0))
    (tensor(0.3989), tensor(0.3408))
    """
    std = var.clamp_min(0).sqrt()
    m, unit = _unit_relu(mean / std.clamp_min(torch.finfo(std.dtype).tiny))
    return torch.where(mean > FAR * std, mean, std * m), var * unit


# In standard deviations, as good as infinite; and where exp(-r^2 / 2) is near the smallest float, it takes 20 times as long.
FAR = 12.0


def _unit_relu(r: Tensor) -> tuple[Tensor, Tensor]:
    """Mean m and variance of `max(0, X)` for X normal with mean r and variance 1; the variance is `Phi + m (r - m)`.

    r is overwritten: fewer passes over memory.
    """
    r = r.clamp_(-FAR, FAR)
    cdf = torch.erf(r * math.sqrt(0.5)).mul_(0.5).add_(0.5)
    density = r.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    m = density.addcmul_(r, cdf)
    return m, cdf.addcmul_(m, r.sub_(m)).clamp_min_(0)


def relu(var: Tensor, x: Tensor) -> Tensor:
    """ReLU (and GELU, where it is up to a third too large at small errors): var `[...]`, x `[..., d]` to `[...]`."""
    std = var.reshape(-1, 1).clamp_min(0).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    unit = in_parts(lambda x, std: _unit_relu(x / std)[1].mean(-1), ROWS, x.reshape(-1, x.shape[-1]), std)
    return var * unit.view(var.shape)


# Vectors at a time: as many as fit in a processor's cache.
ROWS = 2048


def in_parts(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """`function(*tensors)`, which treats each row alone, for `size` rows at a time.

    On a GPU, and when a graph is traced, all at once: few and large kernels are better there.
    """
    if tensors[0].device.type != "cpu" or torch.compiler.is_compiling():
        return function(*tensors)
    return torch.cat([function(*part) for part in zip(*(t.split(max(1, size)) for t in tensors), strict=True)])


def layer_norm(var: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """To first order in the error: `Var x * mean(weight^2) / (variance of x over features + eps)`.

    >>> layer_norm(torch.tensor(0.1), torch.tensor([1.0, 3.0]), None, 0.0)  # the features' variance is 1
    tensor(0.1000)
    """
    gain = 1.0 if weight is None else weight.square().mean()
    # mean of squares less square of the mean: several times quicker than torch.var, and exact enough for a variance of noise
    spread = squared_lengths(x) / x.shape[-1] - x.mean(-1).square()
    return var * gain / (spread.clamp_min(0) + eps)


def attention_output(var_values: Tensor, scores: Tensor) -> Tensor:
    """`sum_j S_ij^2 Var V_j`: var_values `[..., L]`, scores `[..., L, L]` to `[..., L]`.

    >>> attention_output(torch.tensor([1.0, 4.0]), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([1.0000, 1.2500])
    """
    return (scores.square() @ var_values[..., None])[..., 0]

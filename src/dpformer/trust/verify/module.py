"""`verify --module`: a user's own model under Phantom Clipping.

The factory takes nothing and returns `(module, compute_losses, samples)`:

    module           any torch.nn.Module
    compute_losses   compute_losses(module, *samples) -> one loss a sample, [B]; it must use the module it is given, because
                     copies of it in float64 are tried
    samples          a tensor, or a tuple of tensors, whose first dimension is the sample; a handful is enough
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpformer.errors import DPFormerError
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.clipping import Subject, check_clipping, gradient, trainable

RUN_ONLY = ("noise", "sampler", "resume equality", "ledger against statement", "recount of epsilon", "no pickle")


def verify_module(name: str, max_norm: float = 1.0, rule: Literal["automatic", "flat"] = "automatic") -> Verification:
    """All checks that a module alone allows. `name` is `package.module:factory`; the current folder is looked in, too."""
    module, losses, samples = _make(name)
    subject = Subject(module, losses, samples, None, max_norm, rule)
    verification = Verification(name)
    if check_clipping(verification, subject, may_freeze=True):
        verification.check("empty batch", _empty, subject.exact())
    verification.skip("a module alone has no steps, ledger or folder; verify the run that trains it", *RUN_ONLY)
    return verification


def _make(name: str) -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    where, colon, what = name.partition(":")
    if not colon or not where or not what:
        raise DPFormerError(f"--module {name!r} is not package.module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(where), what)
    except (ImportError, AttributeError) as error:
        raise DPFormerError(f"--module {name!r}: cannot be imported ({error})") from None
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise DPFormerError(f"--module {name!r}: the factory must return (module, compute_losses, samples)")
    module, losses, samples = made
    samples = (samples,) if isinstance(samples, Tensor) else tuple(samples)
    if not samples or not all(isinstance(value, Tensor) and value.dim() for value in samples):
        raise DPFormerError(f"--module {name!r}: samples must be a tensor or tensors with the samples first")
    if len({len(value) for value in samples}) > 1 or len(samples[0]) < 2:
        raise DPFormerError(f"--module {name!r}: samples must be at least two, the same number in each tensor")
    return module, losses, samples


def _empty(exact: Subject) -> Outcome:
    try:
        with torch.no_grad():
            exact.of([])()
    except (RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:120]
        raise NotChecked(
            f"the model itself takes no empty batch ({reason}): leave out backward when nobody was drawn, and add the noise"
        ) from None
    norms = exact.clipping().backward(exact.of([]))
    missing = [name for name, p in trainable(exact.module).items() if p.grad is None]
    largest = float(gradient(exact.module).abs().max())
    detail = f"adds {largest:g} to all gradients" + (f" but {', '.join(missing)}, which have none" if missing else "")
    return Outcome(not missing and largest == 0 and len(norms) == 0, detail, {"largest": largest, "missing": missing})

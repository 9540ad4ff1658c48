"""`verify --module`: a user's own model under Phantom Clipping.

The factory takes nothing and returns `(module, compute_losses, samples)`:

    module           any torch.nn.Module
    compute_losses   compute_losses(module, *samples) -> one loss a sample, [B]; it must use the module it is given, because
                     copies of it in float64 are tried
    samples          a tensor, or a tuple of tensors, whose first dimension is the sample; a handful is enough
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.errors import DPFormerError
from dpformer.privacy import Curator, Sample, make_plan
from dpformer.privacy.plan import GRADIENTS
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.clipping import check_clipping, clipping, gradients
from dpformer.trust.verify.noise import DRAWS, noise_outcome
from dpformer.trust.verify.recorder import keys_at, ledger_at
from dpformer.trust.verify.reference import Subject, trainable

RUN_ONLY = ("expected-batch division", "resume equality", "ledger against statement", "recount of epsilon", "no pickle")


def verify_module(name: str, max_norm: float = 1.0, rule: Literal["automatic", "flat"] = "automatic") -> Verification:
    """All checks that a module alone allows. `name` is `package.module:factory`; the current folder is looked in, too."""
    module, losses, samples = _make(name)
    subject = Subject(module, losses, samples, None, max_norm, rule)
    verification = Verification(name)
    if check_clipping(verification, subject, may_freeze=True):
        verification.check("empty batch", lambda: _empty(subject.exact()))
        verification.check("noise scale", lambda: _noise(subject))
    for check in RUN_ONLY:
        verification.skip(check, "a module alone has no steps, ledger or folder; verify the run that trains it")
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
    nothing = tuple(value[:0] for value in exact.samples)
    try:
        with torch.no_grad():
            exact.losses(exact.module, *nothing)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:120]
        raise NotChecked(
            f"the model itself takes no empty batch ({reason}): leave out backward when nobody was drawn, and add the noise"
        ) from None
    norms = clipping(exact).backward(lambda: exact.losses(exact.module, *nothing))
    got = gradients(exact.module)
    missing = [name for name in trainable(exact.module) if name not in got]
    largest = max((float(value.abs().max()) for value in got.values() if value.numel()), default=0.0)
    return Outcome(
        not missing and largest == 0 and len(norms) == 0,
        f"adds {largest:g} to {len(got)} gradients",
        {"largest": largest, "missing": missing},
    )


class _Blank:
    """A query that looks at nobody: its sum is 0, so its answer is noise alone."""

    name, bound = GRADIENTS, 1.0

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._zeros = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
        self.numbers = sum(value.size for value in self._zeros.values())

    def sensitivity(self, grid: float) -> float:
        return self.bound / grid

    def sum(self, people: Any, sample: Sample, grid: float) -> dict[str, np.ndarray]:
        return self._zeros


def _noise(subject: Subject) -> Outcome:
    """Answers of a real Curator to a query over nobody, with as many numbers as the module has."""
    query = _Blank({name: tuple(p.shape) for name, p in trainable(subject.module).items()})
    answers = max(4, math.ceil(DRAWS / query.numbers))
    plan = make_plan(2, 8.0, 0.1, steps=answers)
    curator = Curator(range(2), plan, ledger_at(plan, 0), keys_at(0))
    drawn = {}
    for k in range(answers):
        for name, value in curator.ask(query).values.items():
            drawn[f"{name} {k}"] = value.ravel() / plan.noise_multiplier
    return noise_outcome(drawn, " of the Curator")

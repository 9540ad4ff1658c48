"""Is the clipped sum what it says? Phantom Clipping on some samples, against the loop over single ones."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dpformer.clipping import PhantomClipping
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.reference import Loop, Subject, distance, factors, loop, size, trainable

EXACT = 2e-7
"""Relative room for rounding. All is in float64 but for the weights 1/n of a user's n positions, which are float32 always."""

SLACK = 1e-5
"""Relative room for the clip's own slack on the norm (1e-6, and what it adds where terms cancel)."""

AFTER = ("losses alone", "norms", "sums", "contribution bound", "non-finite sample")


def check_clipping(verification: Verification, subject: Subject, may_freeze: bool) -> bool:
    """All checks that need no training loop. False if nothing can be clipped, and the rest makes no sense."""
    exact = subject.exact()
    single: list[Loop] = []

    def recorded() -> Outcome:
        return _recorded(subject, exact, single, may_freeze)

    if not verification.check("parameters recorded", recorded) and not single:
        for name in AFTER:
            verification.skip(name, "the clipping refuses this model; see 'parameters recorded'")
        return False
    verification.check("losses alone", lambda: _alone(exact, single[0]))
    verification.check("norms", lambda: _norms(exact, single[0]))
    verification.check("sums", lambda: _sums(exact, single[0]))
    verification.check("contribution bound", lambda: _bound(subject, exact, single[0]))
    verification.check("non-finite sample", lambda: _nonfinite(exact))
    return True


def clipping(subject: Subject) -> PhantomClipping:
    """A fresh clipping object, `.grad` cleared."""
    for p in subject.module.parameters():
        p.grad = None
    return PhantomClipping(subject.module, subject.max_norm, subject.rule)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """What is in `.grad`, by name."""
    return {name: p.grad.detach().clone() for name, p in trainable(module).items() if p.grad is not None}


def _recorded(subject: Subject, exact: Subject, single: list[Loop], may_freeze: bool) -> Outcome:
    # As it is trained, so that what the guard refuses in training mode (batch norm) is refused here.
    copied = Subject(
        copy.deepcopy(subject.module).train(), subject.losses, subject.samples, None, subject.max_norm, subject.rule
    )
    own = clipping(copied)
    own.backward(lambda: copied.losses(copied.module, *copied.samples))
    own.check_used()
    single.append(loop(exact))
    names = list(trainable(exact.module))
    silent = [name for name in names if all(sample[name] is None for sample in single[0].gradients)]
    frozen = [name for name, p in exact.module.named_parameters() if not p.requires_grad]
    count = sum(p.numel() for p in trainable(exact.module).values())
    figures = {"trainable": len(names), "values": count, "frozen": frozen, "without_gradient": silent}
    if silent:
        return Outcome(False, f"no loss reaches {', '.join(silent)}", figures)
    if frozen and not may_freeze:
        return Outcome(False, f"frozen, though the recipe trains everything: {', '.join(frozen)}", figures)
    note = f"; {len(frozen)} frozen" if frozen else ""
    return Outcome(
        True, f"{len(names)} tensors, {count:,} values, all recorded, all reached by autograd{note}", figures
    )


def _alone(exact: Subject, single: Loop) -> Outcome:
    with torch.no_grad():
        batched = exact.losses(exact.module, *exact.samples).double()
    off = float(((batched - single.losses).abs() / single.losses.abs().clamp_min(1e-12)).max())
    return Outcome(
        off <= EXACT,
        f"a sample's loss in company and alone differ by {off:.1e} at most (relative)",
        {"difference": off},
    )


def _norms(exact: Subject, single: Loop) -> Outcome:
    got = clipping(exact).norms(lambda: exact.losses(exact.module, *exact.samples))
    # Relative to the largest where a norm is 0: a user without anything to learn.
    off = float(((got - single.norms).abs() / single.norms.clamp_min(1e-6 * float(single.norms.max()))).max())
    return Outcome(
        off <= EXACT,
        f"{exact.size} samples, norms up to {float(single.norms.max()):.3g}, off by {off:.1e} at most (relative)",
        {"samples": exact.size, "difference": off},
    )


def _sums(exact: Subject, single: Loop) -> Outcome:
    weights = torch.linspace(0.5, 1.5, exact.size, dtype=torch.float64)
    clipping(exact).weighted_sum(lambda: exact.losses(exact.module, *exact.samples), weights)
    plain = distance(gradients(exact.module), single.weighted(weights, exact.module))
    # With the factors that belong to the norms it returns: whether those are right is the check before.
    norms = clipping(exact).backward(lambda: exact.losses(exact.module, *exact.samples))
    expected = single.weighted(factors(norms, exact.max_norm, exact.rule), exact.module)
    clipped = distance(gradients(exact.module), expected)
    return Outcome(
        plain <= EXACT and clipped <= SLACK,
        f"weighted sum off by {plain:.1e}, clipped sum by {clipped:.1e} (relative)",
        {"weighted": plain, "clipped": clipped},
    )


def _bound(subject: Subject, exact: Subject, single: Loop) -> Outcome:
    """The contribution of each sample: alone in the type it is trained in, and taken away from the others in float64."""
    largest = 0.0
    own = Subject(
        copy.deepcopy(subject.module).eval(), subject.losses, subject.samples, None, subject.max_norm, subject.rule
    )
    clipping(exact).backward(lambda: exact.losses(exact.module, *exact.samples))
    all_samples = gradients(exact.module)
    for i in range(exact.size):
        clipping(own).backward(lambda: own.losses(own.module, *own.take([i])))  # noqa: B023
        largest = max(largest, size(gradients(own.module)))
        others = [k for k in range(exact.size) if k != i]
        clipping(exact).backward(lambda: exact.losses(exact.module, *exact.take(others)))  # noqa: B023
        rest = gradients(exact.module)
        largest = max(largest, size({name: all_samples[name] - rest[name] for name in all_samples}))
    ratio = largest / exact.max_norm
    return Outcome(
        ratio <= 1 + 2e-6, f"no sample adds more than {ratio:.7f} C, C = {exact.max_norm:g}", {"largest_over_c": ratio}
    )


def _nonfinite(exact: Subject) -> Outcome:
    """Two samples get a loss of nan and of inf; the sum must be that of the others."""
    if exact.size < 3:
        raise NotChecked("it takes three samples or more")
    spoiled = torch.ones(exact.size, dtype=torch.float64)
    spoiled[1], spoiled[2] = torch.nan, torch.inf
    clip = clipping(exact)
    clip.backward(lambda: exact.losses(exact.module, *exact.samples) * spoiled)
    got = gradients(exact.module)
    lost = clip.nonfinite
    others = [0, *range(3, exact.size)]
    clipping(exact).backward(lambda: exact.losses(exact.module, *exact.take(others)))
    off = distance(got, gradients(exact.module))
    good = lost == 2 and off <= EXACT
    return Outcome(
        good,
        f"two spoiled samples: {lost} set aside, the others' sum off by {off:.1e}",
        {"set_aside": lost, "difference": off},
    )

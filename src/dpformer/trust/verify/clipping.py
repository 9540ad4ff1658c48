"""Is the clipped sum what it says? Phantom Clipping on some samples, against single ones through plain autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from dpformer.clipping import PhantomClipping
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification

Losses = Callable[..., Tensor]

EXACT = 2e-7
"""Relative room for rounding. All is in float64 but for the weights 1/n of a user's n positions, which are float32 always."""

SLACK = 1e-5
"""Relative room for the clip's own slack on the norm (1e-6, and what it adds where terms cancel)."""


@dataclass(frozen=True)
class Subject:
    """A model under test.

    losses(module, *samples): one loss a sample, `[B]`, as it is trained. samples: tensors whose first dimension is the sample.
    reference(module, *samples): the same loss for a single sample, from its definition; `losses` itself where there is no other.
    scales: factors of gradients by the parameters' names, as in `PhantomClipping`.
    """

    module: nn.Module
    losses: Losses
    samples: tuple[Tensor, ...]
    reference: Losses | None = None
    max_norm: float = 1.0
    rule: Literal["automatic", "flat"] = "automatic"
    scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many samples."""
        return len(self.samples[0])

    def exact(self) -> Subject:
        """A copy in float64, without dropout, that can be differentiated and changed at will."""
        samples = tuple(value.double() if value.is_floating_point() else value for value in self.samples)
        return replace(self, module=copy.deepcopy(self.module).double().eval(), samples=samples)

    def take(self, places: list[int]) -> tuple[Tensor, ...]:
        """Some samples."""
        return tuple(value[places] for value in self.samples)

    def of(self, places: list[int] | None = None) -> Callable[[], Tensor]:
        """The losses of some samples, or of all, for the clipping."""
        samples = self.samples if places is None else self.take(places)
        return lambda: self.losses(self.module, *samples)

    def clipping(self) -> PhantomClipping:
        """A fresh clipping object, `.grad` cleared."""
        self.module.zero_grad(set_to_none=True)
        return PhantomClipping(self.module, self.max_norm, self.rule, scales=self.scales)

    def clipped(self, places: list[int] | None = None) -> Tensor:
        """The clipped sum of some samples, flat."""
        self.clipping().backward(self.of(places))
        return gradient(self.module)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradient(module: nn.Module) -> Tensor:
    """All of `.grad` as one vector in float64; 0 where there is none."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(module).values()]
    return torch.cat([part.detach().double().flatten() for part in parts])


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def factors(norms: Tensor, max_norm: float, rule: str) -> Tensor:
    """The clip factors `[B]` of the two rules, from their definitions."""
    if rule == "flat":
        return (max_norm / norms.clamp_min(1e-300)).clamp_max(1)
    return max_norm / (norms + 0.01)


@dataclass(frozen=True)
class Alone:
    """Losses `[B]` and scaled gradients `[B, n]` of samples, each alone; and the parameters that no loss reaches."""

    losses: Tensor
    gradients: Tensor
    silent: list[str]


def one_by_one(subject: Subject) -> Alone:
    """Differentiate each sample alone. `subject` should be in float64, see `Subject.exact`."""
    parameters, compute = trainable(subject.module), subject.reference or subject.losses
    losses, gradients, silent = [], [], set(parameters)
    scales = torch.cat([torch.full((p.numel(),), subject.scales.get(name, 1.0)) for name, p in parameters.items()])
    for i in range(subject.size):
        subject.module.zero_grad(set_to_none=True)
        loss = compute(subject.module, *subject.take([i])).sum()
        if loss.requires_grad:
            loss.backward()
        silent -= {name for name, p in parameters.items() if p.grad is not None}
        losses.append(loss.detach().double())
        gradients.append(gradient(subject.module) * scales)
    return Alone(torch.stack(losses), torch.stack(gradients), [name for name in parameters if name in silent])


def check_clipping(verification: Verification, subject: Subject, may_freeze: bool) -> bool:
    """All checks that need no training loop. False if nothing can be clipped, and the rest makes no sense."""
    exact, single = subject.exact(), list[Alone]()
    looks = {
        "losses alone": _alone,
        "norms": _norms,
        "sums": _sums,
        "contribution bound": _bound,
        "non-finite sample": _nonfinite,
    }
    recorded = verification.check("parameters recorded", _recorded, subject, exact, single, may_freeze)
    if not recorded and not single:
        verification.skip("the clipping refuses this model; see 'parameters recorded'", *looks)
        return False
    for name, look in looks.items():
        verification.check(name, look, subject if look is _bound else exact, single[0])
    return True


def _recorded(subject: Subject, exact: Subject, single: list[Alone], may_freeze: bool) -> Outcome:
    # As it is trained, so that what the guard refuses in training mode (batch norm) is refused here.
    trained = replace(subject, module=copy.deepcopy(subject.module).train())
    clipping = trained.clipping()
    clipping.backward(trained.of())
    clipping.check_used()
    single.append(one_by_one(exact))
    silent, names = single[0].silent, trainable(exact.module)
    frozen = [name for name, p in exact.module.named_parameters() if not p.requires_grad]
    count = sum(p.numel() for p in names.values())
    figures = {"trainable": len(names), "values": count, "frozen": frozen, "without_gradient": silent}
    if silent:
        return Outcome(False, f"no loss reaches {', '.join(silent)}", figures)
    if frozen and not may_freeze:
        return Outcome(False, f"frozen, though the recipe trains everything: {', '.join(frozen)}", figures)
    detail = f"{len(names)} tensors, {count:,} values, all recorded, all reached by autograd; {len(frozen)} frozen"
    return Outcome(True, detail, figures)


def _alone(exact: Subject, single: Alone) -> Outcome:
    with torch.no_grad():
        batched = exact.of()().double()
    off = float(((batched - single.losses).abs() / single.losses.abs().clamp_min(1e-12)).max())
    detail = f"a sample's loss in a batch and alone differ by {off:.1e} at most (relative)"
    return Outcome(off <= EXACT, detail, {"difference": off})


def _norms(exact: Subject, single: Alone) -> Outcome:
    expected = single.gradients.norm(dim=1)
    largest = float(expected.max())
    # Relative to the largest where a norm is 0: a user without anything to learn.
    error = (exact.clipping().norms(exact.of()) - expected).abs() / expected.clamp_min(1e-6 * largest)
    off = float(error.max())
    detail = f"{exact.size} samples, norms up to {largest:.3g}, off by {off:.1e} at most (relative)"
    return Outcome(off <= EXACT, detail, {"samples": exact.size, "difference": off})


def _sums(exact: Subject, single: Alone) -> Outcome:
    weights = torch.linspace(0.5, 1.5, exact.size, dtype=torch.float64)
    exact.clipping().weighted_sum(exact.of(), weights)
    plain = distance(gradient(exact.module), weights @ single.gradients)
    # With the factors that belong to the norms it returns: whether those are right is the check before.
    norms = exact.clipping().backward(exact.of())
    expected = factors(norms, exact.max_norm, exact.rule) @ single.gradients
    clipped = distance(gradient(exact.module), expected)
    detail = f"weighted sum off by {plain:.1e}, clipped sum by {clipped:.1e} (relative)"
    return Outcome(plain <= EXACT and clipped <= SLACK, detail, {"weighted": plain, "clipped": clipped})


def _bound(subject: Subject, single: Alone) -> Outcome:
    """The contribution of each sample: alone in the type it is trained in, and taken away from the others in float64."""
    exact, trained = subject.exact(), replace(subject, module=copy.deepcopy(subject.module).eval())
    total, moved = exact.clipped(), []
    for i in range(exact.size):
        others = [k for k in range(exact.size) if k != i]
        moved += [trained.clipped([i]).norm(), (total - exact.clipped(others)).norm()]
    ratio = float(torch.stack(moved).max()) / exact.max_norm
    detail = f"no sample adds more than {ratio:.7f} C, C = {exact.max_norm:g}"
    return Outcome(ratio <= 1 + 2e-6, detail, {"largest_over_c": ratio})


def _nonfinite(exact: Subject, single: Alone) -> Outcome:
    """Two samples get a loss of nan and of inf; the sum must be that of the others."""
    if exact.size < 3:
        raise NotChecked("it takes three samples or more")
    spoiled = torch.ones(exact.size, dtype=torch.float64)
    spoiled[1], spoiled[2] = torch.nan, torch.inf
    clipping = exact.clipping()
    clipping.backward(lambda: exact.of()() * spoiled)
    off = distance(gradient(exact.module), exact.clipped([0, *range(3, exact.size)]))
    detail = f"two spoiled samples: {clipping.nonfinite} set aside, the others' sum off by {off:.1e}"
    figures = {"set_aside": clipping.nonfinite, "difference": off}
    return Outcome(clipping.nonfinite == 2 and off <= EXACT, detail, figures)

"""Negative controls: known defects, put in on purpose. An audit that does not catch them would not catch anything.

Each says how surely it is caught (`power`): the chance that the interval of the estimate leaves the claim out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.clipping import PhantomClipping, TiedCrossEntropy
from dpformer.privacy.noise import rounded_gaussian
from dpformer.trust.audit.sampling import FALSE_ALARM, ByKeys, FixedSize, Shuffled, check_sampling
from dpformer.trust.audit.step_audit import StepAudit
from dpformer.trust.audit.steps import Canary, measure, power


@dataclass(frozen=True)
class Control:
    """A defect, what the audit saw of it, and whether that contradicts the claim."""

    name: str
    defect: str
    seen: str
    power: float | None
    caught: bool

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def half_the_noise(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    """The defect: noise of half the standard deviation."""
    return rounded_gaussian(key, shape, std / 2)


def run_controls(canary: Canary, sigma: float, trials: int, seed: int) -> list[Control]:
    """All of them, at the noise multiplier of the audited plan. `canary`: clipped sums of the audited model."""
    # Twice the mu is seen with fewer trials than an excess of a fifth.
    few = max(trials // 4, 500)
    half = measure(canary, sigma, few, seed, half_the_noise)
    twice = measure(canary.times(2), sigma, few, seed)
    return [
        _control("half the noise", "noise of sigma C / 2 where sigma C is claimed", half, 2.0),
        _control("a duplicated user", "one user's sequence as two samples, each clipped to C", twice, 2.0),
        _no_cross_term(sigma, canary.bound, trials, seed),
        *_not_poisson(seed),
    ]


def _control(name: str, defect: str, measured: StepAudit, factor: float) -> Control:
    seen = f"mu {measured.mu:.3f} in [{measured.low:.3f}, {measured.high:.3f}], claimed {measured.claimed_mu:.3f}"
    return Control(
        name,
        defect,
        seen,
        power(measured.claimed_mu, factor * measured.claimed_mu, measured.trials),
        measured.low > measured.claimed_mu,
    )


class TiedTable(nn.Module):
    """The smallest model with a tied table: the next item from the last one's embedding."""

    def __init__(self, items: int, d: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(items, d, generator=torch.Generator().manual_seed(0)) / 2)
        self.head = TiedCrossEntropy()

    def losses(self, s: Tensor, output: Tensor | None = None) -> Tensor:
        """Mean loss of each next item, `[B]`; `output` is the output table, the same one by default."""
        weights = torch.full(s[:, 1:].shape, 1 / (s.shape[1] - 1))
        hidden = nn.functional.embedding(s[:, :-1], self.table)
        return self.head(hidden, self.table if output is None else output, s[:, 1:], weights)


class _Untied(nn.Module):
    """The same numbers with two tables: its norm lacks the product of the input's side and the output's side."""

    def __init__(self, tied: TiedTable) -> None:
        super().__init__()
        self.tied, self.output = tied, nn.Parameter(tied.table.detach().clone())

    def losses(self, s: Tensor) -> Tensor:
        return self.tied.losses(s, self.output)


def _no_cross_term(sigma: float, max_norm: float, trials: int, seed: int) -> Control:
    """Clip by sqrt(|G_in|^2 + |G_out|^2) instead of |G_in + G_out|; the canary repeats one item: both point the same way."""
    model = TiedTable(40, 8)
    random = torch.Generator().manual_seed(seed)
    users = torch.randint(40, (12, 6), generator=random)
    repeated = torch.full((1, 6), int(torch.randint(40, (1,), generator=random)))

    def clipped(s: Tensor) -> dict[str, Tensor]:
        untied = _Untied(model)
        norms = PhantomClipping(untied).norms(lambda: untied.losses(s))
        model.table.grad = None
        PhantomClipping(model).weighted_sum(lambda: model.losses(s), max_norm / norms)
        assert model.table.grad is not None
        return {"table": model.table.grad.detach().clone()}

    canary = Canary.of_floats(clipped(users), clipped(repeated), max_norm)
    seen = measure(canary, sigma, trials, seed)
    defect = f"a tied table clipped without the cross term: the canary adds {canary.size:.2f} C"
    return _control("no cross term in the tied norm", defect, seen, canary.size)


def _not_poisson(seed: int, users: int = 200, rate: float = 0.25) -> list[Control]:
    controls = []
    kinds = {"shuffled instead of Poisson": Shuffled, "a fixed batch size instead of Poisson": FixedSize}
    for name, kind in kinds.items():
        seen = check_sampling(kind(users, rate, seed).draw, users, rate)
        texts = f"p-values: sizes {seen.sizes:.1e}, counts {seen.counts:.1e}, overlaps {seen.overlaps:.1e}"
        # Sizes do not vary at all, so the statistic is 0 in every draw.
        controls.append(Control(name, "each batch of exactly N q users", texts, 1.0, not seen.passed))
    return controls


def honest_sampling(seed: int, users: int = 200, rate: float = 0.25) -> tuple[bool, str]:
    """The product's own sampler under the same test."""
    seen = check_sampling(ByKeys(users, rate, seed).draw, users, rate)
    text = f"p-values: sizes {seen.sizes:.3f}, counts {seen.counts:.3f}, overlaps {seen.overlaps:.3f}"
    return seen.passed, f"{text}; refuted below {FALSE_ALARM / 3:.0e}"


def canary_sequence(items: int, length: int, seed: int) -> np.ndarray:
    """A user of random items."""
    return np.random.default_rng(seed).integers(1, items + 1, length)

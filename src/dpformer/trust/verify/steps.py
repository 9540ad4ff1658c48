"""Does the training loop do with the clipped sum what the accountant counts? Real steps of a small run, watched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor, nn

from dpformer.models.base import SequenceModel
from dpformer.privacy import noise_source
from dpformer.training.recipe import Recipe
from dpformer.training.run import Run
from dpformer.training.trainer import Trainer
from dpformer.trust.verify.checks import Found, Verification
from dpformer.trust.verify.clipped import SLACK, clipping
from dpformer.trust.verify.loop import Losses, Subject, distance, factors, loop
from dpformer.trust.verify.scratch import Chosen, Recorded

Step = Callable[[np.ndarray], int]

FALSE_ALARM = 1e-6
"""How often sound noise fails the check of its scale."""

STEP_CHECKS = ("every user once", "noise scale", "expected-batch division", "empty batch", "parameters moving")


def losses_of(trainer: Trainer) -> Losses:
    """The losses that a trainer trains with, of any copy of its model."""

    def losses(module: nn.Module, tokens: Tensor) -> Tensor:
        twin = copy.copy(trainer.worker)
        twin.model = module  # type: ignore[assignment]
        return twin.losses(tokens)

    return losses


def definition(module: nn.Module, tokens: Tensor) -> Tensor:
    """One user's loss from its definition, without padding: the mean of -log softmax over the items that follow, `[1]`."""
    tokens = tokens[:, : int((tokens > 0).sum())]
    if tokens.shape[1] < 2:
        return sum(p.sum() * 0.0 for p in module.parameters()).reshape(1)  # type: ignore[union-attr]
    logits = module(tokens[:, :-1])[0] @ module.table[1:].T + module.table_bias[1:]  # type: ignore[index]
    return nn.functional.cross_entropy(logits, tokens[0, 1:] - 1).reshape(1)


def tokens_of(trainer: Trainer, model: SequenceModel) -> Tensor:
    """All users of a (small) trainer, `[N, L + 1]`: rows of the model's vocabulary, other items left out."""
    places = model.places().numpy()
    rows = [
        [int(places[i]) for i in one if places[i] > 0]
        for one in np.split(trainer.train.items, trainer.train.offsets[1:-1])
    ]
    L = trainer.how.max_length + 1
    tokens = torch.zeros(len(rows), max(1, *(min(L, len(one)) for one in rows)), dtype=torch.int64)
    for k, one in enumerate(rows):
        last = one[-L:]
        tokens[k, : len(last)] = torch.tensor(last, dtype=torch.int64)
    return tokens


def check_steps(found: Verification, run: Run, recipe: Recipe, weights: dict[str, Tensor]) -> None:
    """Make a few steps of a small run with chosen batches, from these weights.

    Looked at: each sum before noise, after it, and as the optimiser got it.
    """
    trainer = run.trainer
    trainer.take(weights)
    trainer.model.double()
    # The source of noise that the run itself used; a seed is for runs that are insecure anyway.
    noise = trainer.noise = Recorded(noise_source(recipe.noise, recipe.seed))
    sampler = trainer.sampler = Chosen(trainer.plan.users, trainer.plan.rate)
    _look(found, run, noise, sampler)


def _look(found: Verification, run: Run, noise: Recorded, sampler: Chosen) -> None:
    trainer = run.trainer
    names = dict(trainer.model.named_parameters())
    begun = {name: p.detach().clone() for name, p in names.items()}
    drawn: list[dict[str, Tensor]] = []

    def step(users: np.ndarray) -> int:
        sampler.next = users
        report = trainer.make_step()
        drawn.append({name: noise.after[name] - noise.before[name] for name in noise.after})
        return report.users

    everybody = np.arange(trainer.plan.users)
    found.check("every user once", lambda: _every_user(trainer, noise, step, everybody))
    found.check("expected-batch division", lambda: _division(trainer, noise, step, everybody))
    found.check("empty batch", lambda: _empty(trainer, noise, step))
    found.check("noise scale", lambda: noise_found(drawn, trainer.plan.noise_std(trainer.how.max_norm)))
    still = [name for name, p in names.items() if torch.equal(p.detach(), begun[name])]
    found.check(
        "parameters moving",
        lambda: Found(
            not still,
            f"{len(names)} tensors, all changed in {len(drawn)} steps"
            if not still
            else f"never changed: {', '.join(still)}",
            {"still": still, "steps": len(drawn)},
        ),
    )


def _every_user(trainer: Trainer, noise: Recorded, step: Step, everybody: np.ndarray) -> Found:
    """The sum before noise against the loop, with each user's own norm as the clipping measures it alone."""
    losses, samples, how = losses_of(trainer), (tokens_of(trainer, trainer.model),), trainer.how
    worst = 0.0
    for users in (everybody, everybody[1::2]):
        # The weights change from step to step, so the loop is made anew.
        subject = Subject(copy.deepcopy(trainer.model), losses, samples, definition, how.max_norm, how.rule)
        single = loop(subject)
        clip = clipping(subject)
        norms = [clip.norms(partial(losses, subject.module, *subject.take([i]))) for i in range(subject.size)]
        inside = torch.zeros(subject.size, dtype=torch.float64)
        inside[torch.from_numpy(users)] = 1.0
        weights = inside * factors(torch.cat(norms), how.max_norm, how.rule)
        step(users)
        worst = max(worst, distance(noise.before, single.weighted(weights, subject.module)))
    return Found(
        worst <= SLACK,
        f"batches of {len(everybody)} and {len(everybody[1::2])} users in micro-batches: sums off by {worst:.1e}",
        {"difference": worst},
    )


def _division(trainer: Trainer, noise: Recorded, step: Step, everybody: np.ndarray) -> Found:
    """The optimiser's gradient is the noisy sum by the expected batch, whatever was drawn."""
    expected, found = trainer.plan.batch_size, {}
    for users in (everybody[:1], everybody[:3], everybody):
        step(users)
        by = [
            float((noise.after[name].double() * g.double()).sum() / g.double().square().sum())
            for name, p in trainer.model.named_parameters()
            if (g := p.grad) is not None
        ]
        found[len(users)] = max(by, key=lambda value: abs(value - expected))
    good = all(abs(value / expected - 1) < 1e-6 for value in found.values())
    shown = ", ".join(f"{n} drawn: by {value:.6g}" for n, value in found.items())
    return Found(good, f"expected batch {expected}; {shown}", {"expected": expected, "divisors": found})


def _empty(trainer: Trainer, noise: Recorded, step: Step) -> Found:
    assert trainer.ledger is not None
    charged = trainer.ledger.account().steps_charged
    users = step(np.array([], dtype=np.int64))
    charged = trainer.ledger.account().steps_charged - charged
    largest = max(float(value.abs().max()) for value in noise.before.values())
    silent = [name for name, value in noise.after.items() if not bool((value != 0).all())]
    good = users == 0 and charged == 1 and largest == 0 and not silent
    return Found(
        good,
        f"a step of noise alone: sum before noise {largest:g}, {charged} step charged"
        + (f", no noise on {', '.join(silent)}" if silent else ""),
        {"charged": charged, "largest_before_noise": largest, "without_noise": silent},
    )


def noise_found(drawn: list[dict[str, Tensor]], std: float) -> Found:
    """Whether draws of noise have this standard deviation, in all and in each tensor, and are new every time."""
    if not drawn:
        return Found(False, "no step was made")
    steps = [torch.cat([value.double().flatten() for _, value in sorted(step.items())]) / std for step in drawn]
    together = torch.stack(steps)
    n = together.numel()
    ratio = float(together.square().mean().sqrt())
    low, high = ratio_interval(n, FALSE_ALARM)
    odd = []
    for name in drawn[0]:
        values = torch.stack([step[name].double() for step in drawn]) / std
        bounds = ratio_interval(values.numel(), FALSE_ALARM / len(drawn[0]))
        if not bounds[0] <= float(values.square().mean().sqrt()) <= bounds[1]:
            odd.append(name)
    again = 0.0
    if len(steps) > 1:
        again = max(abs(float((a * b).mean())) for k, a in enumerate(steps) for b in steps[:k])
    good = low <= ratio <= high and not odd and again < 6 / len(steps[0]) ** 0.5
    detail = f"{n:,} draws: {ratio:.4f} of sigma C = {std:.4g}; sound noise is in [{low:.4f}, {high:.4f}]"
    if odd and low <= ratio <= high:
        detail += f"; wrong on {', '.join(odd)}"
    if again >= 6 / len(steps[0]) ** 0.5:
        detail += f"; draws repeat (correlation {again:.2f})"
    return Found(
        good, detail, {"ratio": ratio, "low": low, "high": high, "draws": n, "wrong": odd, "correlation": again}
    )


def ratio_interval(n: int, false_alarm: float) -> tuple[float, float]:
    """Where the root mean square of n standard Gaussians lies but for `false_alarm`: chi-square with n degrees of freedom."""
    return float((chi2.ppf(false_alarm / 2, n) / n) ** 0.5), float((chi2.isf(false_alarm / 2, n) / n) ** 0.5)

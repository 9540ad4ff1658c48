"""A whole training, audited in one run: many canaries, each in by a fair coin, and guesses from all that was released.

Canaries are users of random items, whom nothing else in the data resembles. A canary that is out is replaced by a user with a
single item, who has nothing to learn from: the sums lack the canary, and all else stays as it is. The attacker sees every
noisy sum and every iterate (what the guarantee covers: the released model is a function of them), but not who was drawn. A
canary's score is the sum over steps of <noisy sum, its clipped gradient>, each step centred over all canaries, so that
what they share drops out.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping import PhantomClipping
from dpformer.fit.dpsgd import Trainer
from dpformer.privacy import Answer, Curator
from dpformer.privacy.curator import Noise
from dpformer.privacy.noise import rounded_gaussian
from dpformer.trust.audit.bounds import claimed_mu, epsilon_of, epsilon_refuted, mu_refuted
from dpformer.trust.audit.setting import Setting
from dpformer.trust.verify.network import losses_of
from dpformer.trust.verify.reference import factors

LENGTH = 2
GUESSED = 0.2
"""The share of the canaries that is guessed, fixed beforehand: the surest tenth each way."""


@dataclass(frozen=True)
class OneRun:
    """What the guesses were and what they refute, beside what is claimed."""

    canaries: int
    guesses: int
    correct: int
    steps: int
    delta: float
    claimed_epsilon: float
    claimed_mu: float
    epsilon_low: float
    mu_low: float
    gdp_epsilon_low: float
    scores: np.ndarray
    inside: np.ndarray

    @property
    def passed(self) -> bool:
        """Whether neither reading refutes the claim."""
        return self.epsilon_low <= self.claimed_epsilon and self.mu_low <= self.claimed_mu

    def to_json(self) -> dict[str, Any]:
        """Without the scores."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("scores", "inside")}
        return {**kept, "passed": self.passed}


def audit_training(
    setting: Setting, folder: Path, canaries: int = 300, users: int = 150, noise_scale: float = 1.0
) -> OneRun:
    """Train once with canaries and guess. `noise_scale` below 1 is the defect that must be caught."""
    random = np.random.default_rng([setting.seed, 7])
    # Nobody else's next item, as far as there are items: the gradients of two canaries then hardly meet.
    last = np.resize(random.permutation(setting.items) + 1, canaries)
    secrets = [np.append(random.integers(1, setting.items + 1, LENGTH - 1), y) for y in last]
    inside = random.random(canaries) < 0.5
    # The last two items are held out by the split; a single item is nothing to learn from.
    given = [np.concatenate([s, [1, 1]]) if b else np.array([1]) for s, b in zip(secrets, inside, strict=True)]
    run = setting.begin(folder, [*setting.sequences(users, 3), *given])
    trainer = run.trainer
    noise: Noise = rounded_gaussian if noise_scale == 1 else Scaled(noise_scale)
    people = run.dataset.train(run.recipe.hold_out)
    heard: list[Answer] = []
    curator = Curator(people, run.plan, run.curator.ledger, run.curator.keys, noise=noise)
    curator.keep = lambda place, answer, plan: heard.append(answer)
    tokens = torch.from_numpy(np.stack(secrets))
    losses, scores = losses_of(trainer.worker), torch.zeros(canaries, dtype=torch.float64)
    try:
        while trainer.step < trainer.plan.steps:
            before = copy.deepcopy(trainer.model).double().eval()
            trainer.make_step(curator)
            total = {name: torch.from_numpy(value) for name, value in heard.pop().values.items()}
            slopes = _along(trainer, before, losses, tokens, total)
            scores += slopes - slopes.mean()
        charges = run.plan.charges(run.plan.steps)
        claim, delta = run.plan.total.epsilon, run.plan.delta
    finally:
        run.close()
    guesses = 2 * max(1, round(GUESSED * canaries / 2))
    order = np.argsort(scores.numpy(), kind="stable")
    correct = int((~inside[order[: guesses // 2]]).sum() + inside[order[-guesses // 2 :]].sum())
    mu = mu_refuted(correct, guesses, canaries)
    return OneRun(
        canaries,
        guesses,
        correct,
        trainer.plan.steps,
        delta,
        claim,
        claimed_mu(charges, delta),
        epsilon_refuted(correct, guesses, canaries, delta),
        mu,
        epsilon_of(mu, delta),
        scores.numpy(),
        inside,
    )


def _along(trainer: Trainer, before: torch.nn.Module, losses: Any, tokens: Tensor, total: dict[str, Tensor]) -> Tensor:
    """<noisy sum, clipped gradient> of each canary, `[m]`: the derivative of its loss along the sum, times its clip factor."""
    norms = PhantomClipping(before, trainer.how.max_norm, trainer.how.rule).norms(lambda: losses(before, tokens))
    named = dict(before.named_parameters())
    size = float(torch.sqrt(sum((v.double() ** 2).sum() for v in total.values())))  # type: ignore[arg-type]
    h = 1e-3
    both_losses = []
    with torch.no_grad():
        for sign in (1, -2):  # theta + h G / |G|, then theta - h G / |G|
            for name, value in total.items():
                named[name].add_(value.double(), alpha=sign * h / size)
            both_losses.append(losses(before, tokens).double())
    return (both_losses[0] - both_losses[1]) * size / (2 * h) * factors(norms, trainer.how.max_norm, trainer.how.rule)


class Scaled:
    """The defect: noise of a share of the standard deviation."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        """Too little noise."""
        return rounded_gaussian(key, shape, self.scale * std)

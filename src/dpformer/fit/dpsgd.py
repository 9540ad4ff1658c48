"""DP-SGD, the paper's eq:DPSGD: ask for the clipped sum of a Poisson batch, divide by the expected batch size, step.

    G = (1 / B) (sum_i c_i g_i + sigma C N(0, I))        B the *expected* batch size, a public constant

The paper prints the noise inside Clip; it is added to the clipped sum. Drawing users, charging and noise are the Curator's: a
trainer sees answers alone. Several processes: see `lead_and_follow`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dpformer.clipping import PhantomClipping
from dpformer.fit.adam import Adam, momentum
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.recipe import DPSGDSettings, Recipe
from dpformer.fit.stage import Outputs, Setup, new_network, part_of
from dpformer.fit.workers import Team, Worker
from dpformer.models.network import Network
from dpformer.models.transformer import Transformer
from dpformer.privacy import Answer, PrivacyPlan
from dpformer.privacy.query import Asker
from dpformer.training.clipped_sum import Report
from dpformer.training.groups import Groups

# Share of the steps over which the learning rate rises; it falls linearly after that.
WARMUP = 0.2
# Peak learning rate times the root of the number of steps. Noise adds up to `rate sqrt(steps)` in a parameter, whatever their
# number; chosen on the validation item of MovieLens-1M.
RATE = 0.19
# Factor of the gradients of all but the item tables before clipping, in networks whose layers start as the identity: see
# `Optimisation.clipping`. Chosen on the validation item of MovieLens-1M (docs/statistics.md).
BLOCK_SCALE = 0.5
# Positions of a micro-batch at the most: a matter of memory. Workers side by side share it; see `workers`.
TOKEN_BUDGET = 16384


@dataclass(frozen=True)
class Optimisation:
    """How steps are made. None of it affects the guarantee, as long as it is not chosen by looking at private results.

    learning_rate: the peak; `RATE / sqrt(steps)` if it is None. block_scale: see `clipping`.
    """

    learning_rate: float | None = 1e-2
    weight_decay: float = 1e-5
    max_norm: float = 1.0
    rule: Literal["automatic", "flat"] = "automatic"
    max_length: int = 50
    token_budget: int = TOKEN_BUDGET
    block_scale: float = 1.0

    @classmethod
    def of(cls, recipe: Recipe) -> Optimisation:
        """The steps of a recipe that has them."""
        steps, network = recipe.stage(DPSGDSettings), recipe.network
        assert steps is not None
        assert network is not None
        rule: Literal["automatic", "flat"] = "automatic" if steps.max_norm is None else "flat"
        return cls(
            steps.learning_rate,
            max_norm=steps.max_norm or 1.0,
            rule=rule,
            max_length=network.max_length,
            block_scale=1.0 if network.recency is None else BLOCK_SCALE,
        )

    def clipping(self, model: Network) -> PhantomClipping:
        """Clips the gradients of a network after those of all but its tables are multiplied by `block_scale`.

        What blocks take of a user's norm, the user's rows of the table lose; blocks that start as the identity need less. Adam
        divides by the size of a gradient, so the factor changes the signal over the noise of both, and not their rates.
        """
        tables = {"embedding.weight", "output.weight"}
        names = [name for name, _ in model.named_parameters() if name not in tables and self.block_scale != 1]
        return PhantomClipping(model, self.max_norm, self.rule, scales=dict.fromkeys(names, self.block_scale))

    def rate_at(self, step: int, steps: int) -> float:
        """Learning rate of step 1, 2, ..., steps.

        >>> [round(Optimisation(learning_rate=1.0).rate_at(t, 10), 3) for t in (1, 2, 3, 10)]
        [0.5, 1.0, 1.0, 0.125]
        """
        rise = max(1, round(WARMUP * steps))
        peak = RATE / math.sqrt(steps) if self.learning_rate is None else self.learning_rate
        return peak * (step / rise if step <= rise else (steps - step + 1) / (steps - rise))


class Trainer:
    """Makes the steps of a plan, one at a time; its whole state can be taken and put back between two of them.

    A plan with epsilon inf is trained by the same loop without clipping, and its answers have no noise.
    """

    def __init__(self, model: Network, plan: PrivacyPlan, how: Optimisation) -> None:
        self.model, self.plan, self.how = model, plan, how
        self.step = 0
        self.clipping = how.clipping(model)
        self.worker = Worker(model, self.clipping if plan.private else None)
        positions = plan.batch_size * (how.max_length + 1)
        self.query = GradientSum(
            Team(self.worker, positions),
            Groups.of(plan.users, plan.rate, plan.declared),
            how.max_length,
            how.token_budget,
        )
        noise_std = plan.noise_multiplier * how.max_norm / plan.batch_size if plan.private else 0.0
        self._tracked = model if isinstance(model, Transformer) and model.wants_accumulated() else None
        self.optimizer = Adam(
            model.parameters(), how.weight_decay, momentum(plan.steps), noise_std, self._tracked is not None
        )

    def take(self, weights: dict[str, Tensor]) -> None:
        """Continue with these weights, and the vocabulary that is theirs."""
        self.model.load_state_dict(weights)
        self.query.forget_vocabulary()

    def move(self, device: torch.device) -> None:
        """Continue on another device, between two steps."""
        self.model.to(device)
        self.optimizer.restore(self.optimizer.state())

    def run(self, asker: Asker) -> Iterator[Report]:
        """Make the steps that are left."""
        while self.step < self.plan.steps:
            yield self.make_step(asker)

    def make_step(self, asker: Asker) -> Report:
        """Make one step; with noise alone if nobody was drawn."""
        self.model.train()
        self.update(self.gradients(asker.ask(self.query)))
        return self.query.report

    def gradients(self, answer: Answer) -> list[Tensor]:
        """G of each parameter: the answer divided by the expected batch size."""
        return [
            torch.from_numpy(answer.values[name] / self.plan.batch_size).to(p.device, p.dtype)
            for name, p in self.model.named_parameters()
        ]

    def update(self, gradients: list[Tensor]) -> None:
        """Make a step of Adam by these gradients."""
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad.copy_(gradient)
        self.step += 1
        self.optimizer.step(self.how.rate_at(self.step, self.plan.steps))
        if self._tracked is not None and self.plan.private:
            names = [name for name, _ in self.model.named_parameters()]
            self._tracked.set_accumulated(dict(zip(names, self.optimizer.noise_variances(), strict=True)))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the coming steps depend on, but for the Curator: tensors, and JSON-ready values."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        return {name: value.detach().clone() for name, value in tensors.items()}, {"step": self.step}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from a state."""
        self.take(part_of(tensors, "model"))
        self.optimizer.restore(part_of(tensors, "optimizer"))
        self.step = values["step"]


def network_for_steps(setup: Setup, before: Outputs) -> Network:
    """The network that the steps train: the one that `distil` made, or a new one with the histogram's vocabulary.

    Re-Attention gets the noise of the steps. Positions are counted as if all histories had the greatest length, since lengths
    are private.
    """
    settings, plan = setup.recipe.network, setup.plan
    assert settings is not None
    p = before.frequencies(plan.users)
    network = before.network
    if network is None:
        network = new_network(setup, p)
        if p is not None:
            network.choose(p, bias=settings.vocabulary is not None)
    if settings.reattention not in ("off", "accumulated") and p is not None and plan.private:
        assert isinstance(network, Transformer)
        network.set_errors(plan.noise_multiplier, plan.batch_size, p, torch.ones(settings.max_length))
    return network

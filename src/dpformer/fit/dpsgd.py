"""DP-SGD, the paper's eq. DPSGD: ask for the clipped sum of a Poisson batch, divide by the expected batch, make a step of Adam.

    G = (1 / B) (sum_i c_i g_i + sigma C N(0, I))        B the *expected* batch size, a public constant

The paper prints the noise inside Clip; it is added to the clipped sum. Drawing people, charging and noise are the Curator's; a
trainer sees answers alone. Among several processes rank 0 asks; see `parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dpformer.clipping import PhantomClipping
from dpformer.data import Sequences
from dpformer.fit.adam import Adam
from dpformer.fit.distributed.parallel import ParallelGradientSum
from dpformer.fit.distributed.ranks import ALONE, Ranks
from dpformer.fit.gradient_sum import GradientSum, Groups
from dpformer.fit.workers import Team, Worker
from dpformer.models.network import SequenceModel
from dpformer.privacy import Answer, PrivacyPlan
from dpformer.privacy.query import Asker

Averaging = Literal["none", "ema", "tail"]


@dataclass(frozen=True)
class Optimisation:
    """How steps are made. None of it affects the guarantee, as long as it is not chosen by looking at private results.

    warmup: share of the steps over which the learning rate rises; it falls linearly after that.
    averaging: "tail" is the mean of the last fifth of the iterates, "ema" an exponential mean; free post-processing.
    token_budget: positions of a micro-batch at the most, a matter of memory; workers side by side share it (see `workers`).
    """

    learning_rate: float = 1e-2
    weight_decay: float = 1e-5
    warmup: float = 0.2
    averaging: Averaging = "tail"
    max_norm: float = 1.0
    rule: Literal["automatic", "flat"] = "automatic"
    max_length: int = 50
    token_budget: int = 16384

    def rate_at(self, step: int, steps: int) -> float:
        """Learning rate of step 1, 2, ..., steps.

        >>> [round(Optimisation(learning_rate=1.0).rate_at(t, 10), 3) for t in (1, 2, 3, 10)]
        [0.5, 1.0, 1.0, 0.125]
        """
        rise = max(1, round(self.warmup * steps))
        if step <= rise:
            return self.learning_rate * step / rise
        return self.learning_rate * (steps - step + 1) / (steps - rise)


TAIL = 0.2
EMA = 0.98


@dataclass(frozen=True)
class StepReport:
    """What a step tells the one who runs it. Everything but `step` is computed on private data without noise."""

    step: int
    users: int
    loss: float
    nonfinite: int


class Trainer:
    """Makes the steps of a plan, one at a time; its whole state can be taken and put back between two of them.

    A plan with epsilon inf is trained by the same loop without clipping, and its answers have no noise.
    """

    def __init__(
        self, model: SequenceModel, plan: PrivacyPlan, how: Optimisation, ranks: Ranks = ALONE, about: str = ""
    ) -> None:
        self.model, self.plan, self.how, self.ranks = model, plan, how, ranks
        self.step = 0
        self.clipping = PhantomClipping(model, how.max_norm, how.rule)
        self.worker = Worker(model, self.clipping if plan.private else None)
        positions = plan.batch_size * (how.max_length + 1)
        self.query = GradientSum(
            Team(self.worker, positions), Groups.of(plan.users, plan.rate), how.max_length, how.token_budget
        )
        if ranks.size > 1:
            self.query = ParallelGradientSum(self.query, ranks, f"{about} {how}")
        self.optimizer = Adam(model.parameters(), how.weight_decay)
        self.average: dict[str, Tensor] = {}

    def choose(self, frequencies: Tensor, bias: bool) -> None:
        """Tell the model the released frequencies `[items + 1]`, before the first step; see `SequenceModel.choose`."""
        self.model.choose(frequencies, bias)
        self.query.forget_vocabulary()

    def take(self, weights: dict[str, Tensor]) -> None:
        """Go on with these weights, and the vocabulary that is theirs."""
        self.model.load_state_dict(weights)
        self.query.forget_vocabulary()

    def move(self, device: torch.device) -> None:
        """Go on on another device, between two steps."""
        self.model.to(device)
        self.average = {name: value.to(device) for name, value in self.average.items()}
        self.optimizer.restore(self.optimizer.state())

    def run(self, asker: Asker) -> Iterator[StepReport]:
        """The steps that are left."""
        while self.step < self.plan.steps:
            yield self.make_step(asker)

    def make_step(self, asker: Asker) -> StepReport:
        """One step; with noise alone if nobody was drawn."""
        self.model.train()
        gradients = self.gradients(asker.ask(self.query))
        self.ranks.share_(gradients)
        self.update(gradients)
        seen = self.query.report
        return StepReport(self.step, seen.users, seen.loss / max(1, seen.users), seen.nonfinite)

    def follow_step(self, people: Sequences) -> None:
        """On rank 1, 2, ...: take part in a step of rank 0's."""
        assert isinstance(self.query, ParallelGradientSum)
        self.model.train()
        self.query.follow(people)
        gradients = [torch.zeros_like(p) for p in self.model.parameters()]
        self.ranks.share_(gradients)
        self.update(gradients)

    def gradients(self, answer: Answer) -> list[Tensor]:
        """G of each parameter: the answer divided by the expected batch size."""
        return [
            torch.from_numpy(answer.values[name] / self.plan.batch_size).to(p.device, p.dtype)
            for name, p in self._parameters.items()
        ]

    def update(self, gradients: list[Tensor]) -> None:
        """A step of Adam by these gradients, and the average of the iterates."""
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad.copy_(gradient)
        self.step += 1
        self.optimizer.step(self.how.rate_at(self.step, self.plan.steps))
        self._average(self.step)

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    @torch.no_grad()
    def _average(self, step: int) -> None:
        first = self.plan.steps - int(TAIL * self.plan.steps) + 1
        if self.how.averaging == "none" or (self.how.averaging == "tail" and step < first):
            return
        for name, p in self._parameters.items():
            if name not in self.average:
                self.average[name] = p.detach().clone()
            elif self.how.averaging == "tail":
                self.average[name].lerp_(p, 1 / (step - first + 1))
            else:
                self.average[name].lerp_(p, 1 - EMA)

    @torch.no_grad()
    def finish(self) -> float:
        """Put the averaged parameters into the model; returns the sum of squared averaging weights."""
        for name, value in self.average.items():
            self._parameters[name].copy_(value)
        if not self.average:
            return 1.0
        if self.how.averaging == "tail":
            return 1 / max(1, int(TAIL * self.plan.steps))
        first = EMA ** (2 * (self.step - 1))  # the first iterate's weight, squared; the others' are a geometric series
        return first + (1 - first) * (1 - EMA) / (1 + EMA)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the coming steps depend on, but for the Curator: tensors, and JSON-ready values."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        values = {"step": self.step, "nonfinite": self.clipping.nonfinite}
        return {name: value.detach().clone() for name, value in tensors.items()}, values

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from a state."""
        self.take(_part(tensors, "model"))
        self.average = _part(tensors, "average")
        self.optimizer.restore(_part(tensors, "optimizer"))
        self.step = values["step"]
        self.clipping.nonfinite = values["nonfinite"]


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}

"""The loop: Poisson batch, micro-batches, clipped sum, noise once, division by the expected batch, a step of Adam.

    g = (1 / B) (sum_i c_i g_i + sigma C N(0, I))        B the *expected* batch size, a public constant

The order of things is the guarantee: the clipped sum is complete, then the ledger is charged and synced, then noise is added,
and only then anything looks at the sum.

With several processes (see `ranks`) rank 0 draws the batch and deals it out; each process clips its own users; the clipped sum
goes to rank 0, which alone has ledger and noise, and comes back with noise: so the order is the same, and the other processes
make their step from the noisy sum. Before each charge rank 0 compares what determines the step: a process with other data,
settings or weights ends the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping import PhantomClipping
from dpformer.clipping.head import row_budget
from dpformer.data import PoissonSampler, Sequences, deal, micro_batches
from dpformer.errors import PrivacyError, RankError
from dpformer.models.base import SequenceModel
from dpformer.privacy import Ledger, NoiseSource, PrivacyPlan, fingerprint
from dpformer.training.adam import Adam
from dpformer.training.ranks import ALONE, Ranks
from dpformer.training.workers import Team, Worker

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

    A plan with epsilon inf is trained by the same loop without clipping and noise, and needs neither noise nor ledger. `about`
    names whatever else determines the steps (the recipe, released frequencies), so that a replayed step is known from another.
    Among several processes rank 0 alone has sampler, noise and ledger.
    """

    def __init__(
        self,
        model: SequenceModel,
        train: Sequences,
        plan: PrivacyPlan,
        how: Optimisation,
        sampler: PoissonSampler | None,
        noise: NoiseSource | None = None,
        ledger: Ledger | None = None,
        about: str = "",
        ranks: Ranks = ALONE,
    ) -> None:
        if len(train) != plan.users:
            raise PrivacyError(f"the plan is for {plan.users} users, and the data has {len(train)}; make the plan anew")
        if plan.private and ranks.first and (noise is None or ledger is None):
            raise PrivacyError("a private plan needs a noise source and a ledger")
        if ranks.first != (sampler is not None) or (not ranks.first and (noise or ledger)):
            raise PrivacyError("rank 0 has the sampler, the noise and the ledger, and nobody else")
        if ledger is not None and ledger.plan != plan:
            raise PrivacyError("the ledger is of another plan; use the plan that it was made with")
        self.model, self.train, self.plan, self.how = model, train, plan, how
        self.noise, self.ledger, self.ranks = noise, ledger, ranks
        self.sampler = None if sampler is None else self._checked(sampler)
        self.step = 0
        self.clipping = PhantomClipping(model, how.max_norm, how.rule)
        self.worker = Worker(model, self.clipping if plan.private else None)
        self._team = Team(self.worker)
        self.optimizer = Adam(model.parameters(), how.weight_decay)
        self.average: dict[str, Tensor] = {}
        self.know_vocabulary()
        self._about = fingerprint(about, repr(how), digest(train.items, train.offsets))

    def _checked(self, sampler: PoissonSampler) -> PoissonSampler:
        """A sampler that draws as the plan counts, from entropy as good as the noise's."""
        if sampler.users != self.plan.users or sampler.rate != self.plan.rate:
            raise PrivacyError(
                f"the sampler draws from {sampler.users} users with rate {sampler.rate:g}, the plan from {self.plan.users} with "
                f"{self.plan.rate:g}; use the plan's"
            )
        if sampler.seeded and self.noise is not None and not self.noise.insecure:
            raise PrivacyError("who is drawn comes from a seed, and the noise does not; seed both (insecure) or none")
        return sampler

    def choose(self, frequencies: Tensor, bias: bool) -> None:
        """Tell the model the released frequencies `[items + 1]`, before the first step; see `SequenceModel.choose`."""
        self.model.choose(frequencies, bias)
        self.know_vocabulary()

    def take(self, weights: dict[str, Tensor]) -> None:
        """Go on with these weights, and the vocabulary that is theirs."""
        self.model.load_state_dict(weights)
        self.know_vocabulary()

    def know_vocabulary(self) -> None:
        """Each user's items that the model knows, by their rows: a matter of each user alone."""
        known = self.model.chosen is not None
        self._sequences = self.train.renumbered(self.model.places().numpy()) if known else self.train

    def move(self, device: torch.device) -> None:
        """Go on on another device, between two steps."""
        self.model.to(device)
        self.average = {name: value.to(device) for name, value in self.average.items()}
        self.optimizer.restore(self.optimizer.state())

    def run(self) -> Iterator[StepReport]:
        """The steps that are left."""
        while self.step < self.plan.steps:
            yield self.make_step()

    def make_step(self) -> StepReport:
        """One step; with noise alone if nobody was drawn."""
        step = self.step + 1
        self.model.train()
        tensors = [value.detach().cpu().numpy() for value in (*self.model.state_dict().values(), torch.get_rng_state())]
        weights = digest(*tensors)
        inputs = fingerprint(self._about, str(step), weights)
        users, own = self._draw()
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
        lost = self.clipping.nonfinite
        with self._own_dropout(step):
            loss = self._add_gradients(own)
        # Here rank 0 waits for the slowest; then all parts of the sum are complete.
        said = self.ranks.hear([step, self._about, weights, loss, self.clipping.nonfinite - lost])
        self._check_alike(said)
        for other in said[1:]:
            loss += other[3]
            self.clipping.nonfinite += other[4]
        gradients = [(name, p.grad) for name, p in self._parameters.items() if p.grad is not None]
        sums = [gradient for _, gradient in gradients]
        self.ranks.sum_to_first_(sums)
        if self.plan.private and self.ranks.first:
            assert self.noise is not None
            assert self.ledger is not None
            # The noise goes into both: a bare hash of the data would tell whoever has a guess whether it is right.
            noise, parts = self.noise.state(), [inputs, digest(users)]
            if self.ranks.size > 1:
                # Other processes, or as many on other machines, may round otherwise: made again, it must be this very sum.
                parts += [str(self.ranks.size), digest(*(value.cpu().numpy() for value in sums))]
            self.ledger.authorise_step(step, fingerprint(noise), fingerprint(noise, *parts))
            self.noise.add_noise_(gradients, self.plan.noise_std(self.how.max_norm))
        self.ranks.share_(sums)
        self._update(step)
        return StepReport(step, len(users), loss / max(1, len(users)), self.clipping.nonfinite - lost)

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Who is in the batch (on rank 0; others know their own alone), and whose gradients this process computes."""
        if self.sampler is None:
            own = self.ranks.deal()
            return own, own
        users = self.sampler.draw() if self.plan.sampler == "poisson" else np.arange(self.plan.users)
        # Somebody with less than a pair of items adds nothing, and is in the batch all the same.
        paired = users[self._sequences.lengths[users] > 1]
        if self.ranks.size == 1:
            return users, paired
        lengths = np.minimum(self._sequences.lengths[paired], self.how.max_length + 1)
        return users, self.ranks.deal(deal(paired, lengths, self.ranks.size))

    @contextmanager
    def _own_dropout(self, step: int) -> Iterator[None]:
        """Among several, each process has random numbers of its own, that step and rank tell: a resumed run has the same."""
        if self.ranks.size == 1:
            yield
            return
        state = torch.get_rng_state().numpy().tobytes()  # the same everywhere, and in every step
        with torch.random.fork_rng([self.ranks.device] if self.ranks.device.type == "cuda" else []):
            torch.manual_seed(int(fingerprint(state, str(step), str(self.ranks.rank))[:16], 16) >> 1)
            yield

    def _check_alike(self, said: list[list[Any]]) -> None:
        """All processes must be at the same step of the same training, before anything is charged."""
        for rank, other in enumerate(said):
            for what, mine, theirs in zip(
                ("number of steps", "data or settings", "weights"), said[0], other, strict=False
            ):
                if mine != theirs:
                    raise RankError(
                        f"rank {rank} has not the same {what} as rank 0, so this step was not made, and nothing was spent on it; "
                        "see that all machines have the same versions of dpformer and torch, and sound memory"
                    )

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def _add_gradients(self, users: np.ndarray) -> float:
        """Add the (clipped) gradients of these users to `.grad`; returns the sum of their losses."""
        longest = self.how.max_length + 1
        budget = self.how.token_budget
        # The head keeps a row of the catalogue's width for each token; of a long user, one for each column of the table.
        items, columns = self.model.table.shape
        rows = row_budget(items, budget)
        lengths = np.minimum(self._sequences.lengths[users], longest)
        size = self._team.size(int(lengths.sum()), rows)
        micro = partial(
            micro_batches,
            self._sequences,
            max_length=longest,
            token_budget=max(1, budget // size),
            row_budget=max(1, rows // size),
            longest=columns,
        )
        return self._team.add([micro(part) for part in deal(users, lengths, size)])

    def _update(self, step: int) -> None:
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad.div_(self.plan.batch_size)
        self.optimizer.step(self.how.rate_at(step, self.plan.steps))
        self.step = step
        self._average(step)

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
        """All that the coming steps depend on: tensors, and JSON-ready values. Secret: it tells the noise that comes."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        tensors["random"] = torch.get_rng_state()
        values = {
            "step": self.step,
            "sampler": None if self.sampler is None else self.sampler.state(),
            "noise": None if self.noise is None else self.noise.state(),
            "nonfinite": self.clipping.nonfinite,
        }
        return {name: value.detach().clone() for name, value in tensors.items()}, values

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from a state."""
        self.take(_part(tensors, "model"))
        self.average = _part(tensors, "average")
        self.optimizer.restore(_part(tensors, "optimizer"))
        torch.set_rng_state(tensors["random"])
        self.step = values["step"]
        if self.sampler is not None:
            self.sampler = self._checked(PoissonSampler.restored(values["sampler"]))
        if self.noise is not None:
            self.noise.restore(values["noise"])
        self.clipping.nonfinite = values["nonfinite"]


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def digest(*arrays: np.ndarray) -> str:
    """A SHA-256 over arrays, their shapes and types."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str((array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()

"""Contenders, which make one training step on the same users: ours, with and without privacy, and ordinary PyTorch.

All make the *whole* step: draw the batch (Poisson, the same keys for all, so the same users), collate, sum the users' (clipped)
gradients, add noise where the method is private, divide, update with Adam. The loss of a user is the mean over own tokens.

    private           the project's Trainer, which asks a Curator: Phantom Clipping, exact noise on the grid, ledger
    re-attention      the same with Re-Attention
    own non-private   the same with epsilon inf: same groups, micro-batches and tiles of the head, no clipping, noise and ledger
    plain             ordinary PyTorch: autograd, F.cross_entropy on the tokens that are not padding; micro-batches of the same
                      token budget
    plain padded      the usual way: all users padded to L, F.cross_entropy with ignore_index; as many positions at once
    naive loop        one user at a time, private

Other libraries are in `peers`.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.data import collate
from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.models import ReAttention, Transformer, TransformerSpec
from dpformer.privacy import Keys, PrivacyPlan
from dpformer.privacy.noise import poisson_draw
from dpformer_experiments.bench.workloads import Workload
from dpformer_experiments.curators import seeded_curator

D, BLOCKS = 64, 2
SIGMA = 20.0  # its size costs no time
STABILITY = 0.01  # of automatic clipping, as in `dpformer.clipping.clip`
STEPS = 100
SEED = 0


@dataclass(frozen=True)
class Turn:
    """One step: the places of the drawn users, and the seconds for all of them."""

    users: np.ndarray
    seconds: float


class Contender(Protocol):
    """Makes steps."""

    def step(self) -> Turn:
        """One step on the next batch."""


class Draws:
    """The users that a Curator with `Keys(SEED)` draws, step by step."""

    def __init__(self, users: int, rate: float) -> None:
        self._users, self._rate, self._keys = users, rate, Keys(SEED)

    def draw(self) -> np.ndarray:
        """Places of the users of the next step, int64, ascending."""
        drawn = poisson_draw(self._keys.sample(), self._users, self._rate)
        self._keys.ratchet()
        return drawn


def build(workload: Workload, d: int = D, **options: Any) -> Transformer:
    """The model of all contenders that can train it."""
    torch.manual_seed(SEED)
    return Transformer(TransformerSpec(items=workload.items, max_length=workload.L, d=d, blocks=BLOCKS, **options))


class Own:
    """The project's loop. The plan is private for `private`, else epsilon inf; the ledger is in a temporary folder."""

    def __init__(self, workload: Workload, batch: int, private: bool, reattention: bool = False) -> None:
        users = len(workload.sequences)
        batch = min(batch, users - 1)  # never the full batch, which is another mechanism
        plan = PrivacyPlan(users, batch, STEPS, 8.0 if private else float("inf"), 1e-6, SIGMA if private else 0.0)
        model = build(workload, reattention=ReAttention() if reattention else None)
        if reattention:
            _set_errors(model, workload, batch)
        self.trainer = Trainer(model, plan, Optimisation(max_length=workload.L))
        self._open = ExitStack()
        self.curator = self._open.enter_context(seeded_curator(workload.sequences, plan, SEED))
        self._draws = Draws(users, plan.rate)

    def step(self) -> Turn:
        """A step of the Trainer, from the draw to the update."""
        users = self._draws.draw()
        start = time.perf_counter()
        report = self.trainer.make_step(self.curator)
        seconds = time.perf_counter() - start
        assert report.users == len(users), "the contenders have different users"
        return Turn(users, seconds)


def _set_errors(model: Transformer, workload: Workload, batch: int) -> None:
    s = workload.sequences
    owners = np.repeat(np.arange(len(s)), s.lengths)
    pairs = np.unique(owners * (workload.items + 1) + s.items)
    frequencies = torch.from_numpy(np.bincount(pairs % (workload.items + 1), minlength=workload.items + 1) / len(s))
    lengths = torch.tensor([(s.lengths >= t).mean() for t in range(1, workload.L + 1)])
    model.set_errors(SIGMA, float(batch), frequencies.float().clamp(max=1), lengths.float())


class Summed:
    """Shared by the contenders in this file: the draw, the pieces of a batch, noise and Adam.

    take: if the whole batch would take minutes, a step uses about this many users, evenly from the longest to the shortest. The
    time for their gradients is then scaled to the batch, by tokens or, if all are padded, by users.
    """

    private = False
    padded = False

    def __init__(self, workload: Workload, batch: int, model: nn.Module, take: int | None = None) -> None:
        self.workload, self.model, self.take = workload, model, take
        users = len(workload.sequences)
        self.batch = min(batch, users - 1)
        self.how = Optimisation(max_length=workload.L)
        self._draws = Draws(users, self.batch / users)
        self.parameters = list(model.parameters())
        self.optimizer: Any = torch.optim.Adam(self.parameters, lr=1e-2, weight_decay=self.how.weight_decay)

    def step(self) -> Turn:
        """Draw, sum, finish."""
        start = time.perf_counter()
        users = self._draws.draw()
        pieces = self._some(self.pieces(users))
        self.clear()
        for piece in pieces:
            tokens = self.collate(piece)
            if tokens.shape[1] > 1:  # a single item predicts nothing
                self.add(tokens)
        middle = time.perf_counter()
        self.finish()
        end = time.perf_counter()
        return Turn(users, (middle - start) * self._scale(users, pieces) + end - middle)

    def _some(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        users = sum(map(len, pieces))
        if self.take is None or users <= self.take:
            return pieces
        count = min(len(pieces), math.ceil(self.take * len(pieces) / users))
        return [pieces[int((k + 0.5) * len(pieces) / count)] for k in range(count)]

    def _scale(self, users: np.ndarray, pieces: list[np.ndarray]) -> float:
        taken = np.concatenate(pieces) if pieces else users
        if self.padded:
            return len(users) / max(1, len(taken))
        return self.workload.tokens(users) / max(1, self.workload.tokens(taken))

    def pieces(self, users: np.ndarray) -> list[np.ndarray]:
        """Micro-batches of the Trainer's token budget, as places of users, the longest first.

        Users are cut in the order of their lengths. That has less padding and fewer micro-batches than the Trainer's classes of
        lengths, which only private training needs.
        """
        lengths = np.minimum(self.workload.sequences.lengths[users], self.workload.L + 1)
        order = np.argsort(-lengths, kind="stable")
        parts, start = [], 0
        while start < len(users):
            rows = max(1, self.how.token_budget // max(1, int(lengths[order[start]])))
            parts.append(users[order[start : start + rows]])
            start += rows
        return parts

    def collate(self, piece: np.ndarray) -> Tensor:
        """Tokens `[b, l]`; `[b, L + 1]` if all users are padded."""
        tokens = collate(self.workload.sequences, piece, self.workload.L + 1).tokens
        return F.pad(tokens, (0, self.workload.L + 1 - tokens.shape[1])) if self.padded else tokens

    def clear(self) -> None:
        """Set gradients to zero, as the Trainer does."""
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()

    def add(self, tokens: Tensor) -> None:
        """Add the gradients of some users."""
        raise TypeError("Summed is a base class")

    def finish(self) -> None:
        """Noise where the method is private; division; Adam."""
        for p in self.parameters:
            assert p.grad is not None
            if self.private:
                p.grad.add_(torch.randn_like(p), alpha=SIGMA)
            p.grad.div_(self.batch)
        self.optimizer.step()


def in_rows(users: np.ndarray, rows: int) -> list[np.ndarray]:
    """Cut users into pieces of `rows`."""
    return [users[start : start + rows] for start in range(0, len(users), rows)]


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and weights, each `[b, l]`, as in `Worker.losses`."""
    s, y = tokens[:, :-1], tokens[:, 1:]
    used = y > 0
    return s, y, used / used.sum(1, keepdim=True).clamp_min(1)


class Plain(Summed):
    """Ordinary training, in micro-batches of the Trainer's token budget."""

    def add(self, tokens: Tensor) -> None:
        """Autograd, with logits only for tokens that are not padding."""
        s, y, w = inputs_and_targets(tokens)
        used = y > 0
        logits = F.linear(self.model.states(s)[used], self.model.table, self.model.output_bias)  # type: ignore[operator, arg-type]
        (F.cross_entropy(logits, y[used], reduction="none") * w[used]).sum().backward()


class PlainPadded(Summed):
    """Ordinary training, all users padded to L."""

    padded = True

    def __init__(
        self, workload: Workload, batch: int, model: nn.Module, take: int | None = None, rows: int = 0
    ) -> None:
        super().__init__(workload, batch, model, take)
        self.rows = rows or max(1, self.how.token_budget // workload.L)

    def pieces(self, users: np.ndarray) -> list[np.ndarray]:
        """Users in any order of length."""
        return in_rows(users, self.rows)

    def add(self, tokens: Tensor) -> None:
        """Autograd, with logits for all positions; the loss ignores padding."""
        s, y, w = inputs_and_targets(tokens)
        logits = F.linear(self.model.states(s), self.model.table, self.model.output_bias).flatten(0, 1)  # type: ignore[operator, arg-type]
        losses = F.cross_entropy(logits, y.flatten(), reduction="none", ignore_index=0)
        (losses * w.flatten()).sum().backward()


class Naive(Summed):
    """One user at a time: the definition of per-user clipping."""

    private = True

    def pieces(self, users: np.ndarray) -> list[np.ndarray]:
        """One user each, longest first."""
        return [one for piece in super().pieces(users) for one in in_rows(piece, 1)]

    def add(self, tokens: Tensor) -> None:
        """Compute the gradient and its norm, and add the clipped gradient."""
        s, y, w = inputs_and_targets(tokens)
        logits = F.linear(self.model.states(s)[0], self.model.table, self.model.output_bias)  # type: ignore[operator, arg-type]
        loss = (F.cross_entropy(logits, y[0], reduction="none") * w[0]).sum()
        gradients = torch.autograd.grad(loss, self.parameters)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for p, g in zip(self.parameters, gradients, strict=True):
            assert p.grad is not None
            p.grad.add_(g * (1 / (norm + STABILITY)))

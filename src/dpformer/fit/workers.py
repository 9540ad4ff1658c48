"""Gradients of a batch, by workers side by side: threads that share a model's weights, each with sums of its own.

Most of a step is passes over tiles that fit a core's own cache. Two cores that share each small product wait for each other more
than two that work on different people, so with two threads or more the groups of a batch (see `gradient_sum`) are divided between
two workers, each with half of the threads. How many workers there are depends on public numbers alone.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor, nn

from dpformer.clipping import PhantomClipping, TiedCrossEntropy
from dpformer.data import MicroBatch
from dpformer.models import Network
from dpformer.training.clipped_sum import GroupSums, MasksOf, add_gradients

WORKERS = 2
# Below this many positions in a batch one worker is faster: each micro-batch has a fixed cost.
FEW = 4096
# Numbers of an item table that two workers share: a quarter of a million items of width 64.
LARGE = 2**24

Group = Iterable[MicroBatch]


class Worker:
    """Adds the (clipped) gradients of people to `.grad` of a model, and sums them by groups."""

    def __init__(self, model: Network, clipping: PhantomClipping | None, head: nn.Module | None = None) -> None:
        self.model, self.clipping, self.head = model, clipping, head or TiedCrossEntropy()
        self.sums = GroupSums()

    def add(self, batch: MicroBatch, masks: MasksOf | None = None) -> float:
        """Add the gradients of some people; returns the sum of their losses."""
        tokens = batch.tokens.to(self.model.embedding.weight.device)
        own = None if masks is None else masks(batch.users)
        return add_gradients(self.model, self.clipping, lambda: self.losses(tokens), own)

    def losses(self, tokens: Tensor) -> Tensor:
        """Mean loss of predicting each next item, `[B]`, for sequences `[B, L + 1]`; 0 for a person with a single item."""
        s, y = tokens[:, :-1], tokens[:, 1:]
        used = y > 0
        weights = used / used.sum(1, keepdim=True).clamp_min(1)
        if s.shape[1] == 0:
            s, y, weights = tokens, torch.zeros_like(tokens), torch.zeros(tokens.shape, device=tokens.device)
        losses: Tensor = self.head(self.model.states(s), self.model.table, y, weights, self.model.table_bias)
        return losses

    def sum(self, groups: Iterable[Group], grid: float, masks: MasksOf | None) -> float:
        """Leave the sums of all groups, in whole steps, in `sums`; returns the loss."""
        loss = 0.0
        self.sums.start(self.model)
        self.sums.attach(self.model)
        for group in groups:
            for batch in group:
                loss += self.add(batch, masks)
                self.sums.take()
            self.sums.end_group(grid)
        return loss


class Team:
    """The first worker, whose model is the one that is trained, and another that works beside it on copies of it.

    positions: expected in a batch at the most, a public number.
    """

    def __init__(self, first: Worker, positions: int) -> None:
        self.first = first
        model = first.model
        single = model.embedding.weight.device.type != "cpu" or model.table.numel() > LARGE
        single |= torch.get_num_threads() < WORKERS or positions <= FEW
        self.size = 1 if single else WORKERS
        self._others: list[Worker] = []
        self._threads: tuple[int, int] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def sum(
        self, parts: Sequence[Sequence[Group]], grid: float, masks: MasksOf | None
    ) -> tuple[list[Tensor], float, int]:
        """The sums of all groups in whole steps of `grid`, float64, one tensor a parameter; the loss; samples not finite.

        parts: the groups of each worker. The sums are in memory that the next call overwrites.
        """
        workers = [self.first, *(self._other(k) for k in range(len(parts) - 1))]
        before = [0 if worker.clipping is None else worker.clipping.nonfinite for worker in workers]
        jobs = [partial(worker.sum, part, grid, masks) for worker, part in zip(workers, parts, strict=True)]
        loss = sum(self._side_by_side(jobs)) if len(jobs) > 1 else jobs[0]()
        for other in workers[1:]:
            self.first.sums.add(other.sums)
        nonfinite = sum(
            worker.clipping.nonfinite - start
            for worker, start in zip(workers, before, strict=True)
            if worker.clipping is not None
        )
        return self.first.sums.totals, loss, nonfinite

    def _other(self, k: int) -> Worker:
        """A worker on the weights of the model as it is now; it keeps its memory from step to step."""
        model = _sharing(self.first.model)
        if k == len(self._others):
            mine = self.first.clipping
            clipping = None
            if mine is not None:
                clipping = PhantomClipping(model, mine.clip.max_norm, mine.clip.rule, mine.route, mine.scales)
            self._others.append(Worker(model, clipping))
        other = self._others[k]
        other.model = model
        if other.clipping is not None:
            other.clipping.module = model
        return other

    def _side_by_side(self, jobs: Sequence[Callable[[], float]]) -> list[float]:
        """What they return. None is still at work afterwards, whatever happened."""
        futures = [self._threads_of(len(jobs)).submit(job) for job in jobs]
        try:
            return [future.result() for future in futures]
        finally:
            wait(futures)

    def _threads_of(self, workers: int) -> ThreadPoolExecutor:
        each = max(1, torch.get_num_threads() // workers)
        # A forked process has none of its parent's threads.
        wanted = (os.getpid(), each)
        if self._pool is None or self._threads != wanted:
            # torch keeps the number for each thread that calls it.
            self._pool = ThreadPoolExecutor(workers, "dpformer", torch.set_num_threads, (each,))
            self._threads = wanted
        return self._pool


def _sharing(model: Network) -> Network:
    """A copy of a model in which weights and buffers are the model's own memory."""
    shared: dict[int, object] = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, shared)

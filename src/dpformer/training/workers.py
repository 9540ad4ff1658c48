"""Gradients of a batch, by workers side by side: threads that share a model's weights, each with a sum of its own.

Most of a step is passes over tiles that fit a core's own cache. Two cores that share each small product wait for each other more
than two that work on different users, so with two threads or more a batch is dealt to two workers, each with half of the threads
and half of the token budget. Who goes to which worker depends on the batch alone, and their sums are added in order: made again
with as many threads, a step is the same bits.
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
from dpformer.models.base import SequenceModel

WORKERS = 2
# Tokens of a batch that one worker is as quick with: every micro-batch costs some time however small it is.
FEW = 4096
# Numbers of an item table that two workers share: a quarter of a million items of width 64.
LARGE = 2**24

Part = Iterable[MicroBatch]


class Worker:
    """Adds the (clipped) gradients of users to `.grad` of a model."""

    def __init__(self, model: SequenceModel, clipping: PhantomClipping | None) -> None:
        self.model, self.clipping, self.head = model, clipping, TiedCrossEntropy()

    def add(self, batch: MicroBatch) -> float:
        """Add the gradients of some users; returns the sum of their losses."""
        tokens = batch.tokens.to(self.model.embedding.weight.device)
        found: list[Tensor] = []

        def losses() -> Tensor:
            value = self.losses(tokens)
            found.append(value.detach())
            return value

        if self.clipping is not None:
            self.clipping.backward(losses)
        else:
            losses().sum().backward()
        return float(torch.nan_to_num(found[0]).sum())

    def add_all(self, part: Part) -> float:
        """`add` each of them."""
        return sum(self.add(batch) for batch in part)

    def losses(self, tokens: Tensor) -> Tensor:
        """Mean loss of predicting each next item, `[B]`, for sequences `[B, L + 1]`; 0 for a user with a single item."""
        s, y = tokens[:, :-1], tokens[:, 1:]
        used = y > 0
        weights = used / used.sum(1, keepdim=True).clamp_min(1)
        if s.shape[1] == 0:
            s, y, weights = tokens, torch.zeros_like(tokens), torch.zeros(tokens.shape, device=tokens.device)
        losses: Tensor = self.head(self.model(s), self.model.table, y, weights, self.model.table_bias)
        return losses


class Team:
    """The first worker, whose model is the one that is trained, and another that works beside it on copies of it."""

    def __init__(self, first: Worker) -> None:
        self.first = first
        self._others: list[Worker] = []
        self._sums: list[list[Tensor]] = []
        self._threads: tuple[int, int] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def size(self, tokens: int, budget: int) -> int:
        """How many workers share a batch of so many tokens: one, if they are few or fit the micro-batch of one of two.

        Dropout draws from one source of random numbers, and in what order threads ask it is not known; a large table is work
        enough for all threads, and one more sum of its gradients would be memory for nothing.
        """
        model = self.first.model
        alone = model.random or model.embedding.weight.device.type != "cpu"
        alone |= model.table.numel() > LARGE
        alone |= torch.get_num_threads() < WORKERS or tokens <= max(FEW, budget // WORKERS)
        return 1 if alone else WORKERS

    def add(self, parts: Sequence[Part]) -> float:
        """Add the gradients of all parts, one for each worker, to `.grad` of the model; returns the sum of the losses."""
        if len(parts) == 1:
            return self.first.add_all(parts[0])
        others = [self._other(k) for k in range(len(parts) - 1)]
        workers = [self.first, *others]
        loss = sum(self._side_by_side([partial(w.add_all, part) for w, part in zip(workers, parts, strict=True)]))
        for other in others:
            for p, q in zip(self.first.model.parameters(), other.model.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                p.grad += q.grad
            if self.first.clipping is not None and other.clipping is not None:
                self.first.clipping.nonfinite += other.clipping.nonfinite
                other.clipping.nonfinite = 0
        return loss

    def _other(self, k: int) -> Worker:
        """A worker on the weights of the model as it is now, with gradients at 0; it keeps its memory from step to step."""
        model = _sharing(self.first.model)
        if k == len(self._others):
            mine = self.first.clipping
            clipping = None if mine is None else PhantomClipping(model, mine.clip.max_norm, mine.clip.rule, mine.route)
            self._others.append(Worker(model, clipping))
            self._sums.append([])
        other = self._others[k]
        other.model = model
        if other.clipping is not None:
            other.clipping.module = model
        if [(m.shape, m.dtype) for m in self._sums[k]] != [(p.shape, p.dtype) for p in model.parameters()]:
            self._sums[k] = [torch.empty_like(p) for p in model.parameters()]
        for p, memory in zip(model.parameters(), self._sums[k], strict=True):
            p.grad = memory.zero_()
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
        known = (os.getpid(), each)
        if self._pool is None or self._threads != known:
            # torch keeps the number for each thread that calls it.
            self._pool = ThreadPoolExecutor(workers, "dpformer", torch.set_num_threads, (each,))
            self._threads = known
        return self._pool


def _sharing(model: SequenceModel) -> SequenceModel:
    """A copy of a model in which weights and buffers are the model's own memory."""
    known: dict[int, object] = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    known |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, known)

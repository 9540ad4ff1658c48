"""What the steps of a run of DP-SGD did, for the demo. Norms and attention are computed on people's data: not private."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from dpformer.data import Sequences, collate, micro_batches
from dpformer.fit.dpsgd import Trainer
from dpformer.fit.run import Run
from dpformer.fit.stage import Progress
from dpformer.models import ReAttention, Transformer
from dpformer.report.attention_plot import attention_shift

PEOPLE = 256  # whose norms and attention are looked at
PLAIN_SECONDS = 2.0  # for steps of plain PyTorch; one is made in any case


class Watched:
    """Takes the times of a run's steps, and passes its progress on."""

    def __init__(self, on_progress: Callable[[Progress], None]) -> None:
        self._on_progress, self._last, self._seconds = on_progress, time.perf_counter(), list[float]()

    def __call__(self, progress: Progress) -> None:
        """A piece of work is done."""
        if progress.report is not None:
            self._seconds.append(time.perf_counter() - self._last)
        self._on_progress(progress)
        self._last = time.perf_counter()

    def did(self, run: Run) -> dict[str, Any]:
        """What a finished run did, ready for JSON; norms before clipping are of the last model."""
        trainer = run.trainer
        rows = run.dataset.train(run.recipe.hold_out).renumbered(trainer.model.places().numpy())
        paired = np.flatnonzero(rows.lengths > 1)
        tokens = collate(rows, paired[:PEOPLE], trainer.how.max_length + 1).tokens
        norms = trainer.clipping.norms(lambda: trainer.worker.losses(tokens))
        ours = statistics.median(self._seconds)
        plain = statistics.median(_plain_steps(trainer, rows, paired))
        return {
            "steps": run.plan.steps,
            "users_per_step": run.plan.batch_size,
            "clipped_to": trainer.how.max_norm,
            "norms_not_private": [round(float(q), 3) for q in norms.quantile(torch.tensor([0.05, 0.5, 0.95]).double())],
            "reattention": run.recipe.network is not None and run.recipe.network.reattention != "off",
            "attention_shift_not_private": round(_shift(run, tokens), 4),
            "seconds_per_step": round(ours, 4),
            "seconds_per_step_of_plain_pytorch": round(plain, 4),
        }


def _shift(run: Run, tokens: torch.Tensor) -> float:
    """How far Re-Attention moves the attention of the trained network; of one that is trained without it, how far it would."""
    network = run.trainer.model
    assert isinstance(network, Transformer)
    corrected = Transformer(network.spec.model_copy(update={"reattention": network.reattention or ReAttention()}))
    corrected.load_state_dict(network.state_dict())
    frequencies, plan = run.outputs.frequencies(run.plan.users), run.plan
    if network.reattention is None and frequencies is not None:
        lengths = torch.ones(network.spec.max_length)
        corrected.set_errors(plan.noise_multiplier, plan.batch_size, frequencies, lengths)
    items = tokens if network.chosen is None else network.chosen[tokens]
    return attention_shift(corrected.eval(), items[:, : network.spec.max_length])


def _plain_steps(trainer: Trainer, rows: Sequences, users: np.ndarray) -> Iterator[float]:
    """Seconds of steps without privacy, by torch alone: the same network, as many people, micro-batches of the same size."""
    network, how = copy.deepcopy(trainer.model).train(), trainer.how
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-6)
    drawn = np.resize(users, trainer.plan.batch_size)
    end = time.perf_counter() + PLAIN_SECONDS
    while (began := time.perf_counter()) < end:
        optimizer.zero_grad()
        for batch in micro_batches(rows, drawn, max_length=how.max_length + 1, token_budget=how.token_budget):
            s, y = batch.tokens[:, :-1], batch.tokens[:, 1:]
            logits = F.linear(network.states(s), network.table, network.table_bias)
            losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0, reduction="none").view(y.shape)
            (losses.sum(1) / (y > 0).sum(1)).sum().div(len(drawn)).backward()
        optimizer.step()
        yield time.perf_counter() - began

"""Measure the cost of cutting a batch into micro-batches by group, compared with cutting the whole batch.

Groups depend only on people's places (see `dpformer.fit.gradient_sum`), so that one person's events change the sum of one group
only. The people of a group are cut by classes of lengths. A whole batch, cut at once, has fewer micro-batches. Both sum
the same batches here, with one worker on one thread, and take turns.

    groups            of a batch; `most` is the m of the sensitivity, C / g (1 + 1e-6 + m 2^-21) + sqrt(d)
    positions         of all micro-batches, padding included, per token that is not padding
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from rich.table import Table

from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import DPSGDSettings
from dpformer.models import Network, build
from dpformer.privacy import Keys, PrivacyPlan, Sample
from dpformer.privacy.noise import poisson_draw
from dpformer.training.groups import Groups
from dpformer_experiments.bench.contenders import SEED
from dpformer_experiments.bench.workloads import SHAPES, Workload, find
from dpformer_experiments.curators import seeded_curator

# The name of these figures in those of the training benchmark, whose page shows them.
PART = "grouping"
PRESETS = ("paper", "dpformer")
GRID = 2.0**-26
TODAY, WHOLE = "by group", "whole batch"


def run(quick: bool, say: Any = lambda line: None) -> dict[str, Any]:
    """Figures by workload and preset."""
    figures = {}
    for name in SHAPES:
        workload = find(name)
        for preset in PRESETS:
            say(f"{name}: preset {preset}")
            figures[f"{name}, {preset}"] = measure(workload, preset, 2 if quick else 5)
    return figures


@dataclass(frozen=True)
class Cut:
    """The micro-batches of a batch: their number, positions, tokens, and the seconds (of one core) of their sum."""

    micro_batches: int
    positions: int
    tokens: int
    seconds: float


def measure(workload: Workload, preset: str, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` batches, after a first one; ratios of times are taken batch by batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = make_trainer(workload, preset)
        # One step first: while layers are the identity, gradients do not show that samples are apart, and each batch is checked.
        with seeded_curator(workload.sequences, trainer.plan, SEED) as curator:
            trainer.make_step(curator)
        users, plan = len(workload.sequences), trainer.plan
        queries = {TODAY: trainer.query, WHOLE: with_groups(trainer.query, Groups(users, users))}
        keys = Keys(SEED)
        seen: dict[str, list[Cut]] = {name: [] for name in queries}
        for number in range(rounds + 1):
            drawn = poisson_draw(keys.sample(), users, plan.rate)
            for name, query in queries.items():
                cut = sum_batch(query, workload, Sample(drawn, keys.dropout()))
                if number:
                    seen[name].append(cut)
            keys.ratchet()
    finally:
        torch.set_num_threads(threads)
    groups = trainer.query.groups
    ratios = [a.seconds / b.seconds for a, b in zip(seen[TODAY], seen[WHOLE], strict=True)]
    return {
        "source": workload.source,
        "batch": plan.batch_size,
        "groups": -(-users // groups.block),
        "most": groups.most,
        "cuts": {
            name: {
                "micro_batches": statistics.median(cut.micro_batches for cut in cuts),
                "positions_per_token": statistics.median(cut.positions / cut.tokens for cut in cuts),
                "seconds": statistics.median(cut.seconds for cut in cuts),
            }
            for name, cuts in seen.items()
        },
        "time_over_whole": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
    }


def make_trainer(workload: Workload, preset: str) -> Trainer:
    """The preset's model and settings on a workload. Exact counts choose the vocabulary: nothing is published here."""
    torch.manual_seed(SEED)
    options: dict[str, Any] = {"max_length": workload.L} if preset == "paper" else {}
    recipe, users = make_recipe(preset, **options), len(workload.sequences)
    settings, steps = recipe.network, recipe.stage(DPSGDSettings)
    assert settings is not None
    assert steps is not None
    plan = PrivacyPlan(users, min(steps.batch_size or users // 2, users - 1), 100, 8.0, 1e-6, 40.0)
    network = cast(Network, build(settings.spec(workload.items)))
    counts = np.bincount(workload.sequences.items, minlength=workload.items + 1)
    frequencies = torch.from_numpy(np.clip(counts / users, 1 / users, 1.0)).float()
    network.choose(frequencies, bias=settings.vocabulary is not None)
    return Trainer(network, plan, Optimisation.of(recipe))


def with_groups(query: GradientSum, groups: Groups) -> GradientSum:
    """The same sum by other groups."""
    other = copy.copy(query)
    other.groups = groups
    return other


def sum_batch(query: GradientSum, workload: Workload, sample: Sample) -> Cut:
    """Sum a batch, and count its micro-batches."""
    micro_batches = positions = tokens = 0
    add = query.team.first.add

    def counted(batch: Any, masks: Any = None) -> float:
        nonlocal micro_batches, positions, tokens
        micro_batches += 1
        positions += batch.tokens.numel()
        tokens += int(batch.lengths.sum())
        return add(batch, masks)

    query.team.first.add = counted  # type: ignore[method-assign]
    try:
        start = time.process_time()
        query.sum(workload.sequences, sample, GRID)
        seconds = time.process_time() - start
    finally:
        del query.team.first.add
    return Cut(micro_batches, positions, tokens, seconds)


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table(*COLUMNS, title="groups by place against a batch cut as a whole, one thread")
    for row in rows(figures):
        table.add_row(*row)
    return table


COLUMNS = ("data, preset", "users", "groups", "most", "micro-batches", "positions per token", "time over whole")


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """A row for each workload and preset; if there are two figures, the second is of the whole batch."""
    texts = []
    for name, one in figures.items():
        today, whole = one["cuts"][TODAY], one["cuts"][WHOLE]
        ratio = one["time_over_whole"]
        texts.append(
            [
                name,
                f"{one['batch']:,}",
                f"{one['groups']:,}",
                f"{one['most']:,}",
                f"{today['micro_batches']:g} / {whole['micro_batches']:g}",
                f"{today['positions_per_token']:.2f} / {whole['positions_per_token']:.2f}",
                f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})",
            ]
        )
    return texts

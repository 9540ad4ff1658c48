"""What two runs of one seed share, on the embedded data: a change of one bit in a sum gives other noise.

The key of an answer's noise has the hash of the sum in it (`dpformer.privacy.keys`): else the difference of two answers would be
the difference of two sums, without noise. So runs that differ have other noise from the first step on, and differ as much as runs
of two seeds. The control gives all runs the same noise by its place alone, which shows what rounding and the correction do.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from dpformer.data import load, prepare_named, save
from dpformer.data.named import DEMO
from dpformer.evaluation import evaluate, held_out
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start
from dpformer.privacy import Curator, Keys
from dpformer_experiments.curators import KeysByPlace
from dpformer_experiments.reproduce.page import Page

# The common recipe, with the rate of MovieLens-1M.
RECIPE: dict[str, Any] = {
    "recency": None,
    "max_length": 50,
    "vocabulary": 1000,
    "epochs": 20.0,
    "norm": "post",
    "batch_size": 1500,
    "learning_rate": 0.021,
}
# Name: settings, and a relative change of the first weights.
RUNS: dict[str, tuple[dict[str, Any], float]] = {
    "again": ({}, 0.0),
    "errors tracked, attention plain": ({"reattention": "none"}, 0.0),
    "first weights changed by 1e-7": ({}, 1e-7),
    "Re-Attention": ({"reattention": "logits"}, 0.0),
}


def run(epsilon: float = 8.0, seed: int = 1, seeds: int = 3) -> dict[str, Any]:
    """Compare runs with the first one, plain attention, of the same seed; and that one with those of other seeds."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="dpformer-same-seed-") as temporary:
        data = Path(temporary) / "data"
        save(prepare_named(DEMO), data)
        for keys in (Keys, KeysByPlace):
            first = _trained(data, keys, epsilon, seed, {}, 0.0)
            others = [(name, seed, *changes) for name, changes in RUNS.items()]
            others += [("another seed", seed + k, {}, 0.0) for k in range(1, seeds)]
            for name, own, options, change in others:
                gradient, weights, ndcg = _trained(data, keys, epsilon, own, options, change)
                rows.append(
                    {
                        "noise by": "sum and place" if keys is Keys else "place alone",
                        "run": name,
                        "first gradient, in noise": float((gradient - first[0]).std()),
                        "weights": float((weights - first[1]).norm() / first[1].norm()),
                        "ndcg@10": round(ndcg, 4),
                        "difference": round(ndcg - first[2], 4),
                    }
                )
    return {"unit": "%", "epsilon": epsilon, "seed": seed, "rows": rows}


def _trained(
    data: Path, keys: type[Keys], epsilon: float, seed: int, options: dict[str, Any], change: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The first gradient over the standard deviation of its noise, the last weights, and NDCG@10 in % on the test item."""
    recipe = make_recipe("dpformer", epsilon=epsilon, seed=seed, **RECIPE, **options)
    with tempfile.TemporaryDirectory(prefix="dpformer-same-seed-") as folder:
        opened = start(
            *(Path(folder) / "run", data, recipe),
            make_curator=lambda people, plan, ledger, _: Curator(people, plan, ledger, keys(seed)),
        )
        trainer = opened.begin_steps()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(1 + change * torch.randn(p.shape, generator=generator))
        std = opened.plan.noise_multiplier * trainer.how.max_norm / opened.plan.batch_size
        trainer.model.train()
        gradients = trainer.gradients(opened.curator.ask(trainer.query))
        trainer.update(gradients)
        for _ in trainer.run(opened.curator):
            pass
        dataset, model = load(data), opened.outputs.recommender(recipe).eval()
        figures = evaluate(model, held_out(dataset.sequences, "test"), len(dataset.catalogue))
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        opened.close()
        return _flat(gradients) / std, weights, 100 * figures.masked["ndcg@10"].value


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def page(figures: dict[str, Any]) -> Page:
    """Differences to the first run."""
    rows = [
        (
            *(row["noise by"], row["run"], f"{row['first gradient, in noise']:.1e}", f"{row['weights']:.1e}"),
            *(f"{row['ndcg@10']:.2f}", f"{row['difference']:+.2f}"),
        )
        for row in figures["rows"]
    ]
    note = (
        "Embedded data, common recipe, post-norm, 40 steps. First gradient: standard deviation of its difference from "
        "the first run's, over that of the noise; two independent draws have 1.4. Weights: length of the difference "
        "over the length, at the end. "
        f"NDCG@10 in % on the test item, epsilon {figures['epsilon']:g}, seed {figures['seed']}."
    )
    headings = ("noise by", "run", "first gradient", "weights", "NDCG@10", "difference")
    return Page("What runs of one seed share", "dpformer reproduce same-seed -o docs/results", headings, rows, [note])

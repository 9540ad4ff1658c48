"""Collect what a report says about one run, from the run folder alone: the data is never opened."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.artifact import Artifact, load
from dpformer.artifact.card import commands, evaluated
from dpformer.artifact.layout import EVENTS, ITEMS, METRICS
from dpformer.errors import DPFormerError
from dpformer.evaluation import HEADLINE
from dpformer.evaluation.evaluate import popularity_classes
from dpformer.files import read_json
from dpformer.privacy import epsilon, read_ledger
from dpformer.privacy.attack_bounds import delta_curve, power
from dpformer.privacy.plan import spending
from dpformer.report.attention_plot import attention_lift

# Model-written histories for the attention plot, and their length.
HISTORIES, LENGTH = 256, 20
FALSE_POSITIVES = np.geomspace(1e-3, 1.0, 61)


@dataclass(frozen=True)
class Sample:
    """A history and what is recommended after it: titles, or ids where there is none."""

    history: tuple[str, ...]
    best: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """All that is shown of a run.

    metrics: what `dpformer evaluate` wrote for the test item (else the validation item), or None. losses: (step, loss), not
    private. spent: epsilon after steps. attack: (false positives, the most true positives) of any membership attack. popularity:
    released, relative to the most frequent item, in descending order, or None. lift: attention to head, torso and tail over
    uniform attention, by the name of the attention. given: the samples' histories came from the caller.
    """

    name: str
    folder: Path
    artifact: Artifact
    metrics: dict[str, Any] | None
    losses: list[tuple[float, float]]
    spent: list[tuple[float, float]]
    attack: list[tuple[float, float]]
    popularity: list[float] | None
    lift: dict[str, list[float]] | None
    samples: list[Sample]
    given: bool
    commands: list[str]

    @property
    def items(self) -> int:
        return len(self.artifact.catalogue)

    @property
    def evaluated(self) -> bool:
        """Whether `dpformer evaluate` takes this run."""
        return evaluated(self.artifact.config)

    @property
    def publishable(self) -> bool:
        """Whether what follows from released values alone may be published."""
        return self.artifact.statement.private and not self.artifact.statement.insecure


def gather(folder: Path, name: str, histories: Sequence[str] = ()) -> Facts:
    """Everything about the run in `folder`; `histories` (items between commas) replace samples that the model writes."""
    artifact = load(folder)
    weights = artifact.model.popularity()
    popularity = None
    if weights is not None:
        positive = weights[1:][weights[1:] > 0]
        popularity = (positive.sort(descending=True).values / positive.max()).tolist()
    chosen = [_encode(artifact, folder, text) for text in histories] or sample_histories(artifact, weights)
    return Facts(
        name=name,
        folder=folder,
        artifact=artifact,
        metrics=_metrics(folder),
        losses=_losses(folder / EVENTS),
        spent=_spent(folder, artifact),
        attack=_attack(folder, artifact),
        popularity=popularity,
        lift=_lift(artifact, weights),
        samples=_samples(artifact, chosen),
        given=bool(histories),
        commands=[*commands(artifact.config, folder.name), f"dpformer report {shlex.quote(folder.name)}"],
    )


def _encode(artifact: Artifact, folder: Path, history: str) -> list[int]:
    numbers, unknown = artifact.encode(artifact.split(history))
    if unknown:
        raise DPFormerError(f"--history: {unknown[0]!r} is neither an id nor a title in {folder / ITEMS}")
    return numbers


def sample_histories(artifact: Artifact, weights: Tensor | None, count: int = 5) -> list[list[int]]:
    """Invented histories of two items: items from frequent to rare, each with the item that the model ranks first after it."""
    items = len(artifact.catalogue)
    order = torch.arange(1, items + 1) if weights is None else weights[1:].argsort(descending=True, stable=True) + 1
    # Squares: more of the frequent items, which a private model knows something about.
    places = sorted({int((items // 2) * (k / count) ** 2) for k in range(count)})
    starts = [int(order[p]) for p in places]
    best, _ = artifact.rank([[s] for s in starts], k=1)
    return [[s, int(b)] if b else [s] for s, b in zip(starts, best[:, 0], strict=True)]


def written_histories(artifact: Artifact, weights: Tensor, count: int = HISTORIES, length: int = LENGTH) -> Tensor:
    """Histories `[count, length]` that the model writes: a first item by released popularity, then by its own scores.

    They are drawn from released values alone, with a fixed seed: no person's history is used.
    """
    generator = torch.Generator().manual_seed(0)
    items = len(artifact.catalogue)
    network = artifact.model.trained_network()
    longest = length if network is None else network.spec.max_length
    length = max(1, min(length, items - 1, longest))
    s = torch.multinomial(weights, count, replacement=True, generator=generator)[:, None]
    while s.shape[1] < length:
        scores = artifact.model.scores(s, torch.full((count,), s.shape[1]))
        scores[:, 0] = -torch.inf
        scores.scatter_(1, s, -torch.inf)
        s = torch.cat([s, torch.multinomial(scores.softmax(1), 1, generator=generator)], 1)
    return s


def _lift(artifact: Artifact, weights: Tensor | None) -> dict[str, list[float]] | None:
    network = artifact.model.trained_network()
    if network is None or weights is None:
        return None
    maps = network.attention_maps(written_histories(artifact, weights))
    if maps is None:
        return None
    items, matrices = maps  # items outside of a vocabulary get no attention
    groups = torch.from_numpy(popularity_classes(weights.numpy()))
    lifts = {
        name: [attention_lift(of_block, items, groups) for of_block in matrices[name]] for name in sorted(matrices)
    }
    return {name: torch.stack(of_blocks).mean(0).tolist() for name, of_blocks in lifts.items()}


def _metrics(folder: Path) -> dict[str, Any] | None:
    path = folder / METRICS
    if not path.exists():
        return None
    metrics = read_json(path)
    try:
        item = "test" if "test" in metrics else "validation"
        chosen = metrics[item]
        for part in (chosen["masked"], chosen["unmasked"], *(s["metrics"] for s in chosen["slices"].values())):
            for key in HEADLINE:
                _ = part[key]["value"], part[key]["low"], part[key]["high"]
        return {"item": item, **chosen, "protocol": str(chosen["protocol"])}
    except (KeyError, TypeError) as error:
        raise DPFormerError(
            f"{path}: is damaged (no {error}); write it anew with: dpformer evaluate {folder}"
        ) from None


def _losses(path: Path) -> list[tuple[float, float]]:
    if not path.exists():
        return []
    try:
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        points = [(float(e["step"]), float(e["loss"])) for e in events if e.get("loss") is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DPFormerError(f"{path}: is damaged ({error}); delete it to leave the losses out") from None
    return [(step, loss) for step, loss in points if math.isfinite(loss)]


def _spent(folder: Path, artifact: Artifact) -> list[tuple[float, float]]:
    if not artifact.statement.private or artifact.statement.steps is None:
        return []
    plan = read_ledger(folder).plan
    before = plan.epsilon_after(0).epsilon if plan.releases else 0.0
    return [(0.0, before), *((float(step), value) for step, value in spending(plan).items())]


def _attack(folder: Path, artifact: Artifact) -> list[tuple[float, float]]:
    statement = artifact.statement
    if statement.epsilon == "inf":
        return []
    epsilons, deltas = np.array([statement.epsilon]), np.array([statement.delta])
    if statement.tuning.kind != "accounted" and statement.alone is None:  # else only this one point is valid
        mechanisms = read_ledger(folder).spent()
        epsilons, deltas = delta_curve(mechanisms, epsilon(mechanisms, statement.delta))
        deltas = deltas + statement.data.threshold_delta
    reached = power(FALSE_POSITIVES.tolist(), epsilons, deltas)
    return [(float(a), float(b)) for a, b in zip(FALSE_POSITIVES, reached, strict=True)]


def _samples(artifact: Artifact, histories: Sequence[Sequence[int]]) -> list[Sample]:
    catalogue = artifact.catalogue
    column = "title" if "title" in catalogue.columns else "item_id"
    ids = catalogue["item_id"].to_list()
    names = ["", *(str(i if t is None else t) for t, i in zip(catalogue[column].to_list(), ids, strict=True))]
    best, _ = artifact.rank(histories, k=5)
    return [
        Sample(tuple(names[i] for i in history), tuple(names[i] for i in row if i))
        for history, row in zip(histories, best, strict=True)
    ]

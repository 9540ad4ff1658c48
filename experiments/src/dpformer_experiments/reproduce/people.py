"""More people, more accuracy: presets beside popularity and the oracle, over simulated people and budgets.

People are simulated in the likeness of each data set (`simulator`), 6,000 to 600,000 of them. All but the last item of each is
trained on, and the last one is ranked for 3,000 people, the same for every model. The figures of `transitions` are those of the
statistics inside `default`, which asks for the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpformer.data import Dataset, held_out, load, save
from dpformer.data.manifest import MANIFEST_FORMAT, MANIFEST_VERSION
from dpformer.data.store import MANIFEST
from dpformer.evaluation import evaluate
from dpformer.fit.scorers import count_events
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.data_sets import find_set, fingerprint
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending, values_of
from dpformer_experiments.simulator import KINDS, Generator, Oracle

PEOPLE, EPSILONS = (6_000, 60_000, 600_000), (1.0, 2.0, 4.0, 8.0)
RANKED, SEED = 3_000, 0
DEFAULT, DPFORMER = "default", "dpformer"
# Below 1 / users for all numbers of people.
DELTA = 1e-6


def name_of(kind: str, people: int) -> str:
    """The data set of a kind with so many people."""
    return f"{kind}-like-{people}"


def cells() -> list[Cell]:
    """All trainings, those with few people first."""
    return [
        Cell(
            name_of(kind, people),
            f"{kind}-like, {people:,} people: {preset}",
            epsilon,
            SEED,
            preset=preset,
            options={"hold_out": "test"},
            delta=DELTA,
            sample=RANKED,
            alone=preset == DEFAULT,
        )
        for people in PEOPLE
        for kind in KINDS
        for epsilon in reversed(EPSILONS)
        for preset in (DEFAULT, DPFORMER)
    ]


def prepared(how: Running) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """Folders of simulated people by name, drawn where they are missing; and popularity and the oracle on each."""
    folders, rows = {}, []
    for kind, settings in KINDS.items():
        source = find_set(settings.source, how.data)
        generator = Generator(source.sequences, len(source.catalogue), settings)
        about = [repr(settings), fingerprint(source), SEED]
        for people in PEOPLE:
            folder = how.cells / "data" / name_of(kind, people)
            if not (folder / MANIFEST).is_file() or load(folder).manifest.get("simulated") != about:
                manifest = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "simulated": about}
                save(Dataset(generator.draw(people, SEED), source.catalogue, manifest), folder, force=True)
            folders[name_of(kind, people)] = folder
            rows.append({"kind": kind, "people": people, **_bounds(generator, folder)})
    return folders, rows


def _bounds(generator: Generator, folder: Path) -> dict[str, Any]:
    """NDCG@10 in % of exact popularity, and of the generator itself."""
    held = held_out(load(folder).sequences)
    models = {"popularity": count_events(held.histories, generator.items), "oracle": Oracle(generator)}
    figures = {
        name: evaluate(model, held, generator.items, sample=RANKED).masked["ndcg@10"] for name, model in models.items()
    }
    return {name: round(100 * figure.value, 4) for name, figure in figures.items()}

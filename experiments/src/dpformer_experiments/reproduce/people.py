"""More people, more accuracy: presets beside popularity and the oracle, over simulated people and budgets.

People are simulated in the likeness of each data set (`simulator`), 6,000 to 600,000 of them. All but the last item of each is
trained on, and the last one is ranked for 3,000 people, the same for every model. The figures of `transitions` are those of the
statistics inside `distilled`, which asks for the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpformer.data import Dataset, held_out, load, save
from dpformer.data.manifest import MANIFEST_FORMAT, MANIFEST_VERSION
from dpformer.data.store import MANIFEST
from dpformer.evaluation import Scorer, evaluate
from dpformer.fit.presets import make_recipe
from dpformer.fit.scorers import count_events
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.data_sets import find_set
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending, values_of
from dpformer_experiments.simulator import KINDS, Generator, Oracle

# Amazon Games itself has 31,013 people.
PEOPLE = {"ml-1m": (6_000, 60_000, 600_000), "amazon-games": (6_000, 31_013, 60_000, 600_000)}
EPSILONS = (1.0, 2.0, 4.0, 8.0)
RANKED, SEED = 3_000, 0
PRESETS = ("distilled", "default", "dpformer")
DISTILLED, _, DPFORMER = PRESETS
BELOW = "default below the better"
# Below 1 / users for all numbers of people.
DELTA = 1e-6


def name_of(kind: str, people: int) -> str:
    """The data set of a kind with so many people."""
    return f"{kind}-like-{people}"


def cells() -> list[Cell]:
    """All trainings: few people first, and the ends of the budgets before what is between."""
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
            alone=preset == DISTILLED,
        )
        for people in sorted({people for counts in PEOPLE.values() for people in counts})
        for epsilon in (8.0, 1.0, 2.0, 4.0)
        for kind in KINDS
        if people in PEOPLE[kind]
        for preset in PRESETS
    ]


def prepared(how: Running) -> dict[str, Path]:
    """Folders of simulated people by name, drawn where they are missing."""
    folders = {}
    for kind in KINDS:
        generator = generator_of(kind, how)
        about = [repr(generator.kind), generator.items, SEED]
        for people in PEOPLE[kind]:
            folder = how.cells / "data" / name_of(kind, people)
            if not (folder / MANIFEST).is_file() or load(folder).manifest.get("simulated") != about:
                catalogue = pl.DataFrame({"item": np.arange(1, generator.items + 1, dtype=np.int32)})
                manifest = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "simulated": about}
                people_drawn = generator.draw(people, SEED)
                save(Dataset(people_drawn, catalogue.with_columns(item_id="item"), manifest), folder, force=True)
            folders[name_of(kind, people)] = folder
    return folders


def generator_of(kind: str, how: Running) -> Generator:
    """The generator of a kind, from its data set."""
    source = find_set(KINDS[kind].source, how.data)
    return Generator(source.sequences, len(source.catalogue), KINDS[kind])


def bounds(generator: Generator, folder: Path) -> dict[str, float]:
    """NDCG@10 in % of exact popularity, and of the generator itself."""
    held = held_out(load(folder).sequences)
    models: dict[str, Scorer] = {
        "popularity": count_events(held.histories, generator.items),
        "oracle": Oracle(generator),
    }
    figures = {
        name: evaluate(model, held, generator.items, sample=RANKED).masked["ndcg@10"] for name, model in models.items()
    }
    return {name: round(100 * figure.value, 4) for name, figure in figures.items()}


def run(*, how: Running) -> dict[str, Any]:
    """Run all cells that are not finished."""
    folders = prepared(how)
    known = []
    for kind in KINDS:
        generator = generator_of(kind, how)
        for people in PEOPLE[kind]:
            known.append({"kind": kind, "people": people, **bounds(generator, folders[name_of(kind, people)])})
    return measure(known, run_cells(cells(), folders, how))


def measure(known: Sequence[Mapping[str, Any]], outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each kind, number of people and budget: NDCG@10 in %, None where a cell is not finished."""
    records = {(o.cell.dataset, o.cell.preset, o.cell.epsilon): o.record for o in outcomes}
    rows = []
    counts = {bound["people"] for bound in known}
    signals = {(people, epsilon): signal(people, epsilon) for people in counts for epsilon in EPSILONS}
    for bound in known:
        for epsilon in EPSILONS:
            found = {
                preset: records.get((name_of(bound["kind"], bound["people"]), preset, epsilon)) for preset in PRESETS
            }
            distilled = found[DISTILLED]
            figures = {"transitions": None if distilled is None else distilled["transitions alone"], **found}
            measured = {name: None if of is None else round(values_of([of])[0], 4) for name, of in figures.items()}
            rows.append(
                {
                    **{name: bound[name] for name in ("kind", "people")},
                    "epsilon": epsilon,
                    "popularity": bound["popularity"],
                    **measured,
                    "oracle": bound["oracle"],
                    BELOW: below([measured[name] for name in PRESETS]),
                    "95 % half": max((_half(of) for of in found.values() if of is not None), default=None),
                    **signals[bound["people"], epsilon],
                }
            )
    about = {"unit": "%", "delta": DELTA, "ranked": RANKED, "seed": SEED}
    return {**about, "rows": rows, **ending(outcomes)}


def below(values: Sequence[float | None]) -> float | None:
    """How far the default is below the better of the other two, in % of it; the order is that of `PRESETS`."""
    distilled, default, dpformer = values
    if distilled is None or default is None or dpformer is None:
        return None
    return round(max(0.0, 100 * (1 - default / max(distilled, dpformer))), 1)


def _half(record: Mapping[str, Any]) -> float:
    """Half the width of the 95 % interval over the ranked people, in %."""
    figure = record["test"]["masked"]["ndcg@10"]
    return round(50 * (float(figure["high"]) - float(figure["low"])), 2)


def signal(people: int, epsilon: float) -> dict[str, float]:
    """sqrt(T) B / sigma of `dpformer`, in thousands: with its batch B of so many people, and with half of all."""
    usual = make_recipe(DPFORMER, epsilon=epsilon, delta=DELTA)
    half = usual.changed({"dpsgd.batch_size": people // 2, "dpsgd.epochs": 40.0})
    plans = {"signal over noise": usual.plan(people), "with half of all": half.plan(people)}
    return {
        name: round(math.sqrt(plan.steps) * plan.batch_size / plan.noise_multiplier / 1000, 1)
        for name, plan in plans.items()
    }


def page(figures: dict[str, Any]) -> Page:
    """The table."""
    models = ("popularity", "transitions", *PRESETS, "oracle")
    rows = [
        (
            f"{row['kind']}-like",
            f"{row['people']:,}",
            f"{row['epsilon']:g}",
            *("queued" if row[name] is None else f"{row[name]:.2f}" for name in models),
            *(
                "" if row[name] is None else text.format(row[name])
                for name, text in (("95 % half", "± {:.2f}"), (BELOW, "{:.1f} %"))
            ),
            f"{row['signal over noise']:.0f} / {row['with half of all']:.0f}",
        )
        for row in figures["rows"]
    ]
    note = (
        f"NDCG@10 in % on the last item of {figures['ranked']:,} people, drawn uniformly; trained on all but the last item of "
        f"all people; all items ranked, seen items masked; delta {figures['delta']:g}, one seed. People are simulated: the next "
        "item from a mixture of the data set's own lagged transitions, 40 events each for ml-1m and the lengths of the data set "
        "for amazon-games. Popularity and the oracle, which ranks by the generator's own probabilities, are not private."
    )
    interval = (
        "95 % interval: half its width over the ranked people, of the preset with the widest. Default below the better: of "
        "`distilled` and `dpformer`, in % of it; differences well within the interval say little."
    )
    noise = "Signal over noise: sqrt(steps) batch / sigma of `dpformer`, in thousands, with its batch / with half of all people."
    headings = ("people like those of", "people", "epsilon", *models, "95 % interval", BELOW, "signal over noise")
    return Page(
        "More people, more accuracy",
        "dpformer reproduce people -o docs/results",
        headings,
        rows,
        [note, interval, noise],
    )

"""MovieLens-1M split by time, beside leave-one-out: the same methods, their settings as they are.

Leave-one-out trains on what other people did after the moment that a model is asked about. A split by time does not: a model is
trained on all events before a date, and asked for the first item of each person from that date on. The date is the first
midnight (UTC) by which 90 % of the events have happened. Amazon Games is not here: its file has no times, only their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpformer.data import held_out, load, prepare, save
from dpformer.data.named import MIN_EVENTS
from dpformer.data.store import MANIFEST
from dpformer_experiments.reproduce import ceiling
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.methods import POPULAR
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.refit import file_with_times, read_events
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import METRICS, ending, mean_and_spread, values_of, with_spread

SHARE, EPSILON, SEEDS = 0.9, 8.0, 3
HOUR, DAY = 3_600, 86_400
WHOLE, BY_TIME = "ml-1m", "ml-1m-by-time"
# Presets of a row, and at most how many seeds of it.
PRESETS = {
    "preset transitions": ("transitions", 3),
    "preset distilled": ("distilled", 3),
    "preset dpformer": ("dpformer", 1),
    "preset default": ("default", 1),
}


def cells(seeds: int = SEEDS) -> list[Cell]:
    """The cells of both splits, the cheap ones first; training sees all but the test item, or all before the date."""
    sets = (BY_TIME, WHOLE)
    popularity = [Cell(dataset, POPULAR, math.inf, 1, "popularity") for dataset in sets]
    private = [
        Cell(dataset, method, EPSILON, seed, preset=preset, options={"hold_out": "test"})
        for method, (preset, most) in PRESETS.items()
        for dataset in sets
        for seed in range(1, min(seeds, most) + 1)
    ]
    return popularity + private + [replace(ceiling.final(WHOLE), dataset=dataset) for dataset in sets]


def run(*, how: Running, seeds: int = SEEDS, events: pl.DataFrame | None = None) -> dict[str, Any]:
    """Run all cells that are not finished. events: user_id, item_id and timestamp in seconds, in place of MovieLens-1M."""
    log = read_events(how.data) if events is None else events
    places = folders(how, events)
    asked: dict[str, dict[str, Any]] = {}
    date, before = "", 1.0
    for name, place in places.items():
        sequences = load(place).sequences
        held = held_out(sequences)
        asked[name] = {"people": len(held.evaluated), "asked": held.asked, "left out": held.left_out}
        asked[name]["within an hour"] = round(within_an_hour(log, None if sequences.split is None else held.date), 4)
        if sequences.split is not None:
            date, before = sequences.split.date[:10], int(sequences.split.before.sum()) / len(sequences.items)
    about = {"date": date, "before": round(before, 4), "protocols": asked}
    return measure(run_cells(cells(seeds), places, how), about)


def folders(how: Running, events: pl.DataFrame | None = None) -> dict[str, Path]:
    """Folders of both splits, prepared, by the names that their cells have."""
    times = (read_events(how.data) if events is None else events)["timestamp"].to_numpy()
    # From the file, so that items are numbered as in the data set of the tables, whose runs are then found.
    log: Any = file_with_times(how.data) if events is None else events
    least = MIN_EVENTS if events is None else 0
    options: dict[str, dict[str, Any]] = {BY_TIME: {"split": "time", "date": date_of(times)}, WHOLE: {}}
    result = {name: how.cells / "data" / f"time-split-{name}" for name in options}
    for name, place in result.items():
        save(prepare(log, min_events=least, **options[name]), place, force=(place / MANIFEST).is_file())
    return result


def date_of(times: np.ndarray, share: float = SHARE) -> str:
    """The first midnight (UTC) by which this share of the events has happened. times: in seconds.

    >>> date_of(np.arange(10) * 86_400)
    '1970-01-10'
    """
    last = np.sort(times)[math.ceil(share * len(times)) - 1]
    return str(np.datetime64(int(last) // DAY + 1, "D"))


def within_an_hour(log: pl.DataFrame, date: str | None) -> float:
    """The share of asked items that came at most an hour after the person's event before. date: None for leave-one-out."""
    events = log.sort("timestamp", maintain_order=True)
    events = events.with_columns(gap=pl.col("timestamp").diff().over("user_id"))
    if date is None:
        asked = events.group_by("user_id", maintain_order=True).last()
    else:
        cut = int(np.datetime64(date, "s").astype(int))
        asked = events.filter(pl.col("timestamp") >= cut).group_by("user_id", maintain_order=True).first()
    return float(np.mean(asked["gap"].drop_nulls().to_numpy() <= HOUR))


def measure(outcomes: Sequence[CellResult], about: Mapping[str, Any]) -> dict[str, Any]:
    """A row for each method, with its figures under both splits."""
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys(o.cell.method for o in outcomes):
        row: dict[str, Any] = {"method": method}
        for dataset, label in ((BY_TIME, ""), (WHOLE, "leave-one-out ")):
            mine = [o for o in outcomes if (o.cell.method, o.cell.dataset) == (method, dataset)]
            found = [o.record for o in mine if o.record is not None]
            row["epsilon"] = "inf" if math.isinf(mine[0].cell.epsilon) else mine[0].cell.epsilon
            row[f"{label}seeds"] = len(found)
            for metric in METRICS:
                row |= mean_and_spread(label + metric, values_of(found, metric))
            cell = mine[0].cell
            row[f"{label}command"] = (
                cell.command("time-split") if cell.work == "recipe" else "dpformer reproduce time-split"
            )
        rows.append(row)
    return {"unit": "%", **about, "rows": rows, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Both splits side by side."""
    rows = [
        (
            row["method"],
            f"{row['epsilon']}",
            *(with_spread(row, metric) or "queued" for metric in METRICS),
            *(with_spread(row, f"leave-one-out {metric}") or "queued" for metric in METRICS),
            f"{row['seeds']} / {row['leave-one-out seeds']}",
            f"`{row['command']}`",
        )
        for row in figures["rows"]
    ]
    both = ("NDCG@10", "HIT@10")
    headings = ("method", "epsilon", *(f"{metric}, by time" for metric in both))
    headings += (*(f"{metric}, leave-one-out" for metric in both), "seeds", "command, by time")
    date, share = figures["date"], 100 * figures["before"]
    by_time, whole = (figures["protocols"][name] for name in (BY_TIME, WHOLE))
    notes = [
        "In %, delta 1e-5, ± standard deviation over seeds; MovieLens-1M, all items ranked, seen items masked. By time: "
        f"{by_time['asked']}; {by_time['people']:,} people, the others are {by_time['left out']}. Leave-one-out: "
        f"{whole['asked']}; {whole['people']:,} people. The people differ, so a difference between the splits is of people and "
        "of time together; only methods of one column can be compared. Within an hour of the person's event before it are "
        f"{100 * by_time['within an hour']:.1f} % of the items asked for by time, where a new session has usually begun, and "
        f"{100 * whole['within an hour']:.1f} % of those of leave-one-out.",
        f"The date, {date}, is the first midnight (UTC) by which {100 * SHARE:g} % of the events have happened; {share:.1f} % "
        f"are before it. `dpformer prepare ratings.dat --min-events 5 --split time --date {date} -o {BY_TIME}`. Models are "
        "trained on all before the test item, or before the date, with the settings of their presets, which were chosen under "
        "leave-one-out on the validation item; exact popularity leaves out the validation item too.",
        "Amazon Games has no row: its file has the order of each person's events, and no times.",
    ]
    return Page("Split by time", "dpformer reproduce time-split -o docs/results", headings, rows, notes, brief=6)

"""What `refit` gains: MovieLens-1M cut by time into four quarters, a release after each.

The events are cut at three times into four quarters of equal size. Each user's last event is the test item and is in no log.
There are two kinds of log, the events of the quarter alone and all events so far, and two ways to release: a new fit each time,
and `refit`, which combines the answers with those of the releases before. All four releases together may spend `epsilon`, so
each may spend what `dpformer plan --weekly 4 --total EPSILON` says. Beside them stands one fit at the end with all of the
budget.

A release is evaluated on the people whose test item falls into its quarter, from everything that they did before it. Noise is
seeded so that the figures can be reproduced; a model that is published must not be seeded.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpformer.artifact import load as load_artifact
from dpformer.data import Dataset, HeldOut, held_out, load, prepare, save
from dpformer.data.named import ML_1M, cache_folder, fetch
from dpformer.errors import DataError, PrivacyError
from dpformer.evaluation import evaluate
from dpformer.fit.presets import make_recipe
from dpformer.fit.prior import prior_from
from dpformer.fit.run import start
from dpformer.privacy import Charge
from dpformer.privacy.account import Cap, PeopleAccount, RunCharge, largest_epsilon
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer_experiments.reproduce.data_sets import VARIABLES
from dpformer_experiments.reproduce.page import Page

QUARTERS, DELTA = 4, 1e-5
WINDOW, SO_FAR = "the quarter alone", "all so far"
FIT, REFIT, ONE = "fit", "refit", "one fit at the end"
METRICS = ("ndcg@10", "hit@10")


def run(
    *,
    epsilon: list[float] | None = None,
    seeds: int = 3,
    data: Mapping[str, Path] | None = None,
    preset: str = "distilled",
    events: pl.DataFrame | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fit, refit and evaluate. epsilon: of all four releases together, 8 by default. events: in place of MovieLens-1M."""
    if seeds < 1 or len(epsilon or [8.0]) != 1:
        raise PrivacyError("give one --epsilon, the total of the four releases, and --seeds 1 or more")
    total = float((epsilon or [8.0])[0])
    log = read_events(dict(data or {})) if events is None else events
    whole = prepare(log)
    items = whole.catalogue.drop("item")
    test = log.sort("timestamp", maintain_order=True).group_by("user_id", maintain_order=True).last()
    cuts = np.quantile(log["timestamp"].to_numpy(), np.arange(1, QUARTERS) / QUARTERS)
    log = log.with_columns(quarter=pl.Series(np.searchsorted(cuts, log["timestamp"].to_numpy())))
    known = log.join(test, on=["user_id", "item_id", "timestamp"], how="anti")
    users = [known.filter(pl.col("quarter") == q)["user_id"].n_unique() for q in range(QUARTERS)]
    of_users = pl.DataFrame({"user_id": whole.sequences.users}).join(test, on="user_id", maintain_order="left")
    asked = [
        _only(held_out(whole.sequences), np.searchsorted(cuts, of_users["timestamp"]) == q) for q in range(QUARTERS)
    ]
    shape = RunCharge("", "", "", 0, total, DELTA, (Charge("answers", gaussian_multiplier(total, DELTA)),))
    each = largest_epsilon((), Cap(total, DELTA), shape, QUARTERS)
    rows: dict[tuple[str, str], list[list[list[float]]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folders: dict[tuple[str, int], Path] = {}
        for q in range(QUARTERS):
            for kind, chosen in ((WINDOW, pl.col("quarter") == q), (SO_FAR, pl.col("quarter") <= q)):
                folders[kind, q] = Path(place) / f"{kind} {q}"
                save(prepare(known.filter(chosen), catalogue=items), folders[kind, q])
        for seed in range(1, seeds + 1):
            releases = _Releases(Path(place) / str(seed), preset, seed, say)
            for kind, way in ((WINDOW, FIT), (WINDOW, REFIT), (SO_FAR, FIT), (SO_FAR, REFIT)):
                account = releases.new_account(kind, Cap(total, DELTA)) if way == REFIT else None
                # The first release is the same in all four, noise included.
                first = releases.release(
                    f"{kind}, {way}, release 1", folders[WINDOW, 0], each, account, seed=1000 * seed
                )
                made = [first]
                for q in range(1, QUARTERS):
                    before = made[-1] if way == REFIT else None
                    name = f"{kind}, {way}, release {q + 1}"
                    made.append(releases.release(name, folders[kind, q], each, account, before))
                for q, folder in enumerate(made):
                    rows.setdefault((kind, way), [[] for _ in asked])[q].append(_figures(folder, asked[q], whole))
            folder = releases.release(ONE, folders[SO_FAR, QUARTERS - 1], total)
            for q, held in enumerate(asked):
                rows.setdefault((SO_FAR, ONE), [[] for _ in asked])[q].append(_figures(folder, held, whole))
    return {
        "epsilon": total,
        "each": each,
        "delta": DELTA,
        "preset": preset,
        "seeds": seeds,
        "cuts": [str(np.datetime64(int(cut), "s")).replace("T", " ") for cut in cuts],
        "users": users,
        "evaluated": [len(held.evaluated) for held in asked],
        "rows": [
            {"log": kind, "way": way, "epsilon": total if way == ONE else each, "releases": [_mean(q) for q in found]}
            for (kind, way), found in rows.items()
        ],
    }


class _Releases:
    """Makes run folders with one noise seed after the other: the same noise twice would cancel, or double."""

    def __init__(self, place: Path, preset: str, seed: int, say: Callable[[str], None]) -> None:
        self._place, self._preset, self._seed, self._say = place, preset, seed, say
        self._seeds = itertools.count(1000 * seed + 1)

    def new_account(self, name: str, cap: Cap) -> PeopleAccount:
        """An account of people for a chain of refits."""
        return PeopleAccount.create(self._place / f"{name}.account", cap)

    def release(
        self,
        name: str,
        data: Path,
        epsilon: float,
        account: PeopleAccount | None = None,
        before: Path | None = None,
        seed: int | None = None,
    ) -> Path:
        """Fit on a prepared folder; before: the last run, whose answers are a prior. seed: of the noise, a new one by default."""
        self._say(f"seed {self._seed}: {name}, epsilon {epsilon:g}")
        seed = next(self._seeds) if seed is None else seed
        options: dict[str, Any] = {"hold_out": "nothing", "delta": DELTA, "epsilon": epsilon, "seed": seed}
        prior = None if before is None else prior_from(before, load(data))
        recipe = make_recipe(self._preset, **options)
        start(self._place / name, data, recipe, account=account, prior=prior).train()
        return self._place / name


def file_with_times(data: Mapping[str, Path]) -> Path:
    """The file of MovieLens-1M."""
    path = data.get(ML_1M.name) or (
        Path(os.environ[VARIABLES[ML_1M.name]]) if VARIABLES[ML_1M.name] in os.environ else None
    )
    file = fetch(ML_1M, cache_folder()) if path is None else path / ML_1M.file if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file}: no such file; --data ml-1m=PATH takes {ML_1M.file}, which has the times")
    return file


def read_events(data: Mapping[str, Path]) -> pl.DataFrame:
    """The events of MovieLens-1M with their times, of users and items with at least 5 events, as in the prepared data set."""
    file = file_with_times(data)
    fields = pl.scan_lines(file).select(pl.col("line").str.split_exact("::", 3)).unnest("line").collect()
    log = fields.select(
        user_id=pl.col("field_0").cast(pl.Int64), item_id="field_1", timestamp=pl.col("field_3").cast(pl.Int64)
    )
    return log.filter((pl.len().over("user_id") >= 5) & (pl.len().over("item_id") >= 5))


def _only(held: HeldOut, chosen: np.ndarray) -> HeldOut:
    """The users among those to evaluate where `chosen`, bool [N], is true."""
    kept = chosen[held.evaluated]
    return replace(held, evaluated=held.evaluated[kept], targets=held.targets[kept])


def _figures(run: Path, held: HeldOut, whole: Dataset) -> list[float]:
    model = load_artifact(run)
    found = evaluate(model, held.renumbered(whole.numbers_in(model.catalogue)), len(model.catalogue)).masked
    return [100 * found[metric].value for metric in METRICS]


def _mean(of_seeds: list[list[float]]) -> dict[str, dict[str, float | None]]:
    return {
        metric: {
            "mean": round(statistics.fmean(values), 3),
            "std": round(statistics.stdev(values), 3) if len(values) > 1 else None,
        }
        for metric, values in zip(METRICS, zip(*of_seeds, strict=True), strict=True)
    }


def page(figures: dict[str, Any]) -> Page:
    """A row for each way, a column for each release."""
    headings = ("log", "way", "epsilon of a release", *(f"release {q + 1}" for q in range(QUARTERS)))
    rows = [
        (
            row["log"],
            row["way"],
            f"{row['epsilon']:g}",
            *(" / ".join(_text(release[metric]) for metric in METRICS) for release in row["releases"]),
        )
        for row in figures["rows"]
    ]
    spread = " ± standard deviation" if figures["seeds"] > 1 else ""
    evaluated, users = (", ".join(f"{n:,}" for n in figures[name]) for name in ("evaluated", "users"))
    notes = [
        f"NDCG@10 / HIT@10 in % on the people whose test item falls into the quarter of the release ({evaluated}), mean{spread} "
        f"over {figures['seeds']} noise seeds; preset {figures['preset']}, delta {figures['delta']:g}. The four releases "
        f"together are epsilon {figures['epsilon']:g}; so is the one fit at the end, which has seen all quarters.",
        f"MovieLens-1M, cut at {', '.join(figures['cuts'])} (UTC) into quarters with equal numbers of events; their people: "
        f"{users}. Each user's last event is the test item and in no log. Items of the history are masked, ties count "
        "against the model.",
    ]
    command = f"dpformer reproduce refit --epsilon {figures['epsilon']:g} --seeds {figures['seeds']} -o docs/results"
    return Page("Release again: fit or refit", command, headings, rows, notes)


def _text(figure: dict[str, float | None]) -> str:
    return f"{figure['mean']:.2f}" + ("" if figure["std"] is None else f" ± {figure['std']:.2f}")

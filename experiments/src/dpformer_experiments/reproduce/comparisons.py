"""Compare finished figures with the paper's claims: what was measured, and the verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.errors import DPFormerError
from dpformer_experiments.reproduce import heat_maps, paper, regimes, tables
from dpformer_experiments.reproduce.methods import row_name

CELLS = len(tables.SETS) * len(paper.EPSILONS)
HOLDS, IN_PART, DOES_NOT, OPEN = "holds", "holds in part", "does not hold", "open"
Measured = tuple[str, str]  # what was measured, and the verdict


class Figures:
    """The results in a folder, by name; None for one that was not made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        rows = [row for name in tables.SETS for row in (self.read(name) or {"rows": []})["rows"]]
        if not rows:
            raise DPFormerError(f"{folder}: contains no table; make one: dpformer reproduce table-1 -o {folder}")
        self._rows = {(row["dataset"], row["method"], row["epsilon"]): row for row in rows}

    def read(self, name: str) -> dict[str, Any] | None:
        """The figures of a result."""
        path = self._folder / f"{name}.json"
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found

    def ndcg(self, dataset: str, method: str, epsilon: float) -> float | None:
        """NDCG@10 of a cell of the tables."""
        found: float | None = self._rows.get((dataset, method, epsilon), {"ndcg@10": None})["ndcg@10"]
        return found

    def at(self, dataset: str, epsilon: float, methods: Sequence[str]) -> str:
        """The place of a comparison, and the fewest seeds of its methods: `ml-1m at 5 (1 seed)`."""
        rows = [self._rows[dataset, method, epsilon] for method in methods if (dataset, method, epsilon) in self._rows]
        seeds = min(len(row["seeds"]) for row in rows if row["ndcg@10"] is not None)
        return f"{dataset} at {epsilon:g} ({seeds} seed{'s' * (seeds > 1)})"


def versus(one: str, others: Sequence[str], family: str) -> Callable[[Figures], Measured]:
    """Compare a method with the best of others in the cells of a family of rows that have all of them."""

    def measure(figures: Figures) -> Measured:
        texts, wins, cells = [], 0, 0
        for dataset in tables.SETS.values():
            for epsilon in paper.EPSILONS:
                mine = figures.ndcg(dataset, row_name(one, family), epsilon)
                theirs = {other: figures.ndcg(dataset, row_name(other, family), epsilon) for other in others}
                known = {other: value for other, value in theirs.items() if value is not None}
                if mine is None or len(known) < len(others):
                    continue
                cells, wins = cells + 1, wins + (mine > max(known.values()))
                shown = ", ".join(f"{_short(other)} {value:.2f}" for other, value in known.items())
                at = figures.at(dataset, epsilon, [row_name(method, family) for method in (one, *others)])
                texts.append(f"{at}: {_short(one)} {mine:.2f}, {shown}")
        return _joined(texts), _verdict(wins, cells, CELLS)

    return measure


def gains(figures: Figures) -> Measured:
    """Relative gains of Re-Attention beside the reported ones."""
    texts, wins, cells = [], 0, 0
    for family in ("common recipe", "repaired"):
        for dataset in tables.SETS.values():
            for epsilon in paper.EPSILONS:
                methods = [row_name(name, family) for name in (paper.VANILLA, paper.DPFORMER)]
                without, corrected = (figures.ndcg(dataset, method, epsilon) for method in methods)
                if without is None or corrected is None:
                    continue
                said, of = (paper.reported(dataset, name, epsilon) for name in (paper.DPFORMER, paper.VANILLA))
                assert said is not None
                assert of is not None
                reported, gain = 100 * (said[0] / of[0] - 1), 100 * (corrected / without - 1)
                cells, wins = cells + 1, wins + (gain > reported / 2)
                at = figures.at(dataset, epsilon, methods)
                texts.append(f"{at}, {family}: {gain:+.1f} % (reported {reported:+.0f} %)")
    for row in (figures.read("reattention") or {"rows": []})["rows"]:
        if row["errors"] == regimes.NAMES[regimes.ACCUMULATED] and row["seeds"]:
            share = 100 * row["test gain"] / row["test off"]
            texts.append(
                f"{row['regime']}, accumulated errors, {len(row['seeds'])} seed{'s' * (len(row['seeds']) > 1)}: {share:+.1f} %"
            )
    return _joined(texts), _verdict(wins, cells, 2 * CELLS)


def level(figures: Figures) -> Measured:
    """Accuracy at the paper's settings, repaired, and of our preset, beside what is reported."""
    texts, wins, cells = [], 0, 0
    for dataset in tables.SETS.values():
        for epsilon in paper.EPSILONS:
            said = paper.reported(dataset, paper.DPFORMER, epsilon)
            assert said is not None
            own = {
                "to the letter": figures.ndcg(dataset, paper.DPFORMER, epsilon),
                "repaired": figures.ndcg(dataset, row_name(paper.DPFORMER, "repaired"), epsilon),
                "common recipe": figures.ndcg(dataset, row_name(paper.DPFORMER, "common recipe"), epsilon),
                "preset dpformer": figures.ndcg(dataset, "DPFormer, pure, all but the test item", epsilon),
            }
            known = {name: value for name, value in own.items() if value is not None}
            if not known:
                continue
            texts.append(
                f"{dataset} at {epsilon:g}: reported {said[0]:.2f}; "
                + ", ".join(f"{n} {v:.2f}" for n, v in known.items())
            )
            same = [value for name, value in known.items() if name != "preset dpformer"]
            cells, wins = cells + bool(same), wins + (bool(same) and max(same) >= said[0])
    return _joined(texts), _verdict(wins, cells, CELLS)


def speed(over: str, least: float) -> Callable[[Figures], Measured]:
    """The speed of private training over another contender of the benchmark, which must be at least `least`."""

    def measure(figures: Figures) -> Measured:
        report = figures.read("performance")
        if report is None:
            return "", OPEN
        # The median of the rounds' ratios, as everywhere: both take turns in a round.
        rates = {
            name: about["contenders"][over]["private_over_it"]["median"]
            for name, about in report["workloads"].items()
            if over in about["contenders"]
        }
        texts = [f"{name}: {rate:.2f} times as fast as {over}" for name, rate in rates.items()]
        return _joined(texts), _verdict(sum(rate >= least for rate in rates.values()), len(rates), len(rates))

    return measure


def memory(figures: Figures) -> Measured:
    """How many users fit in the memory in which per-sample gradients are held."""
    report = figures.read("performance")
    if report is None:
        return "", OPEN
    texts, wins = [], 0
    for name, about in report["workloads"].items():
        padded, sizes = about["what_fits"]["opacus padded"]["users"], [int(b) for b in about["memory"]["private"]]
        peaks = [run["peak_mb"] for run in about["memory"]["private"].values()]
        texts.append(
            f"{name}: per-sample gradients fit {padded} users in {report['room_mb'] / 1024:g} GB; ours {max(sizes):,} "
            f"({max(sizes) / padded:.0f} times as many) at a peak of {max(peaks) / 1024:.2f} GB"
        )
        wins += max(sizes) >= 10 * padded and max(peaks) < report["room_mb"]
    # The memory of Ghost Clipping was not measured.
    return _joined(texts), f"{IN_PART if wins else DOES_NOT} ({wins} of {len(texts)}, against per-sample gradients)"


def curves(figures: Figures) -> Measured:
    """With Re-Attention over without: the mean over all epochs (faster) and the change of slope between points (smoother)."""
    found: dict[tuple[str, float, str], list[list[float]]] = {}
    for row in (figures.read("convergence") or {"rows": []})["rows"]:
        if row["epoch"] is not None and row["seeds"] > 1:
            found.setdefault((row["dataset"], row["epsilon"], row["model"]), []).append(row["ndcg@10 of seeds"])
    texts, wins, cells = [], 0, 0
    for dataset, epsilon, model in found:
        if model != "DPFormer" or (dataset, epsilon, "Transformer") not in found:
            continue
        ours, theirs = (
            np.array(found[dataset, epsilon, one]) for one in ("DPFormer", "Transformer")
        )  # [epochs, seeds]
        gain = ours.mean() - theirs.mean()
        error = math.sqrt(sum(curve.mean(0).var(ddof=1) / curve.shape[1] for curve in (ours, theirs)))
        rough = np.abs(np.diff(ours, 2, 0)).mean() / np.abs(np.diff(theirs, 2, 0)).mean()
        cells, wins = cells + 1, wins + bool(gain > 2 * error and rough < 0.9)
        texts.append(
            f"{dataset} at {epsilon:g} ({ours.shape[1]} seeds): mean over all epochs {gain:+.2f} ± {error:.2f}, change of slope "
            f"between points {rough:.2f} of that without"
        )
    return _joined(texts), _verdict(wins, cells, 4)


def diagonal(figures: Figures) -> Measured:
    """Where the best cell of each heat map lies."""
    texts, wins, cells = [], 0, 0
    for name in ("embedding-sharing", "grid"):
        rows = [row for row in (figures.read(name) or {"rows": []})["rows"] if row["ndcg@10"] is not None]
        for setting in dict.fromkeys(row["setting"] for row in rows):
            own = [row for row in rows if row["setting"] == setting]
            if len(own) < len(paper.BATCH_SIZES) * len(paper.LEARNING_RATES):
                continue
            best = max(own, key=lambda row: row["ndcg@10"])
            large = best["batch_size"] >= 2048 and best["learning_rate"] >= 7e-3
            cells, wins = cells + 1, wins + large
            texts.append(f"{name}, {setting}: best at batch {best['batch_size']} and rate {best['learning_rate']:g}")
    return _joined(texts), _verdict(wins, cells, 5)


def cell_by_cell(name: str, one: str) -> Callable[[Figures], Measured]:
    """In how many cells of a heat map a setting is better than each other one, and the best figure of each setting."""

    def measure(figures: Figures) -> Measured:
        rows = [row for row in (figures.read(name) or {"rows": []})["rows"] if row["ndcg@10"] is not None]
        by_setting: dict[str, dict[tuple[int, float], float]] = {}
        for row in rows:
            by_setting.setdefault(row["setting"], {})[row["batch_size"], row["learning_rate"]] = row["ndcg@10"]
        mine = by_setting.pop(one, {})
        texts, wins, cells = [], 0, 0
        for other, theirs in by_setting.items():
            both = mine.keys() & theirs.keys()
            if not both:
                continue
            better = sum(mine[place] > theirs[place] for place in both)
            cells, wins = cells + len(both), wins + better
            best = max(mine[place] for place in both), max(theirs[place] for place in both)
            texts.append(
                f"{one} better than {other} in {better} of {len(both)} cells (best {best[0]:.2f}, {best[1]:.2f})"
            )
        of = len(paper.BATCH_SIZES) * len(paper.LEARNING_RATES) * (len(heat_maps.MAPS[name].settings) - 1)
        return _joined(texts), _verdict(wins, cells, of)

    return measure


def _joined(texts: Sequence[str]) -> str:
    return "; ".join(texts) or "no finished runs yet: queued"


def _verdict(wins: int, cells: int, of: int) -> str:
    """The verdict by the comparisons in which the claim held, and how many of them are made."""
    if cells == 0:
        return OPEN
    verdict = HOLDS if wins == cells else IN_PART if wins else DOES_NOT
    return f"{verdict} ({wins} of {cells}{'' if cells == of else f'; {of - cells} to come'})"


def _short(name: str) -> str:
    return name.partition(" (")[0]

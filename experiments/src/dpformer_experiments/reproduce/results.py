"""Merge all results: docs/results.json and docs/results.md, from the figures of the tables and a page of prose.

The prose is `results/page.md`, written by hand; a line `<!-- results: WHAT -->` in it is replaced by figures. WHAT is
`table-1`, `table-2`, `accuracy` (the plot against epsilon), `protocol`, `times`, or `tried` (all configurations).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpformer.errors import DPFormerError
from dpformer_experiments.reproduce import tables
from dpformer_experiments.reproduce.methods import shown
from dpformer_experiments.reproduce.page import Page, new_figure, save_figure
from dpformer_experiments.reproduce.runs import read_lines
from dpformer_experiments.reproduce.summary import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROSE = "page.md"
_MARK = re.compile(r"^<!-- results: ([\w-]+) -->$", re.M)
_MADE = "<!-- made by `dpformer reproduce results` from results/page.md and results/*.json; edit those -->"


def run(*, out: Path) -> dict[str, Any]:
    """Merge the tables in `out`/results: one record for each cell, masked and not."""
    tables_by_name = {}
    for name in tables.SETS:
        path = out / "results" / f"{name}.json"
        if path.is_file():
            tables_by_name[name] = json.loads(path.read_text(encoding="utf-8"))
    if not tables_by_name:
        raise DPFormerError(
            f"{out / 'results'}: contains no table; make one: dpformer reproduce table-1 -o {out / 'results'}"
        )
    rows = [record for figures in tables_by_name.values() for record in records(figures)]
    # Files of cells that were run by `fit` and `evaluate` contain records.
    for path in sorted((out / "results").glob("*.json")):
        other = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(other, dict) and path.stem not in tables.SETS:
            rows += other.get("records", [])
    return {"rows": rows, "tables": tables_by_name}


def records(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """A table as flat records: each cell that was run, with seen items masked and unmasked."""
    result = []
    for row in figures["rows"]:
        for masked, prefix in ((True, ""), (False, "unmasked ")):
            if row[f"{prefix}ndcg@10"] is None:
                continue
            result.append(
                {
                    "dataset": row["dataset"],
                    "method": row["method"],
                    "epsilon": row["epsilon"],
                    "delta": row["delta"],
                    "masked": masked,
                    **{metric: row[prefix + metric] for metric in METRICS},
                    "std": {metric: row[f"{prefix}{metric} std"] for metric in METRICS},
                    "seeds": row["seeds"],
                    "command": row["command"],
                }
            )
    return result


def page(figures: dict[str, Any]) -> Page:
    """The records, for the terminal."""
    rows = [
        (
            *(str(row[key]) for key in ("dataset", "method", "epsilon")),
            "masked" if row["masked"] else "unmasked",
            *(f"{row[metric]:.2f}" for metric in METRICS),
            str(len(row["seeds"])),
        )
        for row in figures["rows"]
    ]
    headings = ("data", "method", "epsilon", "seen items", "NDCG@10", "HIT@10", "seeds")
    return Page("Results, test item, in %", "dpformer reproduce results -o docs", headings, rows)


def draw(figures: dict[str, Any]) -> Figure:
    """Accuracy against epsilon, a panel for each data set."""
    all_tables = figures["tables"]
    figure, axes = new_figure(1, len(all_tables), (6.6 * len(all_tables), 4.8))
    for axis, table in zip(axes[0], all_tables.values(), strict=True):
        tables.draw_accuracy(axis, table)
    return figure


def write(figures: dict[str, Any], out: Path) -> list[Path]:
    """results.json, results.md and figures/accuracy.svg in `out`."""
    (out / "figures").mkdir(parents=True, exist_ok=True)
    save_figure(draw(figures), out / "figures" / "accuracy")
    data = {"unit": "%", "item": "test", "records": figures["rows"]}
    (out / "results.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    prose = out / "results" / PROSE
    text = prose.read_text(encoding="utf-8") if prose.is_file() else default_prose()
    (out / "results.md").write_text(render(text, figures["tables"], out), encoding="utf-8")
    return [out / "results.json", out / "results.md", out / "figures" / "accuracy.svg"]


def default_prose() -> str:
    """A page without prose, for a folder that has none."""
    return "# Results\n\n" + "\n\n".join(f"<!-- results: {name} -->" for name in PARTS) + "\n"


def render(prose: str, all_tables: dict[str, Any], out: Path) -> str:
    """Fill in the marks of the prose. An unknown mark is an error: a misspelt one would hide a table."""

    def fill(mark: re.Match[str]) -> str:
        if mark[1] not in PARTS:
            raise DPFormerError(f"{PROSE}: no part is called {mark[1]!r}; there are: {', '.join(PARTS)}")
        return PARTS[mark[1]](all_tables, out) or "Not made yet."

    return f"{_MADE}\n\n" + _MARK.sub(fill, prose)


def _table(name: str) -> Callable[[dict[str, Any], Path], str]:
    def part(all_tables: dict[str, Any], out: Path) -> str:
        if name not in all_tables:
            return ""
        shown = tables.page(all_tables[name])
        return f"`{shown.command}`\n\n{shown.grid()}"

    return part


def _accuracy(all_tables: dict[str, Any], out: Path) -> str:
    return "![accuracy against epsilon](figures/accuracy.svg)"


def _protocol(all_tables: dict[str, Any], out: Path) -> str:
    lines = [
        f"- {figures['dataset']}, {line}." for figures in all_tables.values() for line in figures["protocol"].values()
    ]
    notes = tables.page(next(iter(all_tables.values()))).notes[:2]
    return "\n\n".join([*notes, "\n".join(lines)])


def _times(all_tables: dict[str, Any], out: Path) -> str:
    rows = [
        (
            row["dataset"],
            shown(row["method"]),
            f"{float(row['epsilon']):g}",
            f"{row['minutes a seed']:.1f}",
            f"`{row['command']}`",
        )
        for figures in all_tables.values()
        for row in figures["rows"]
        if row["minutes a seed"] is not None
    ]
    return Page("", "", ("data", "method", "epsilon", "minutes a seed, one core", "command of a seed"), rows).grid()


def _tried(all_tables: dict[str, Any], out: Path) -> str:
    """The logs of what was tried, and how many runs each holds."""
    rows = []
    for path in sorted((out / "results").glob("tried-*.jsonl")):
        rows.append((f"[{path.name}](results/{path.name})", f"{len(read_lines(path))}"))
    return Page("", "", ("log of everything tried", "runs"), rows).grid() if rows else ""


PARTS: dict[str, Callable[[dict[str, Any], Path], str]] = {
    **{name: _table(name) for name in tables.SETS},
    "accuracy": _accuracy,
    "protocol": _protocol,
    "times": _times,
    "tried": _tried,
}

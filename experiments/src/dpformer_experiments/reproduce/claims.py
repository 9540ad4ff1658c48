"""The paper's claims, one row each: the claim, where it stands, what we measured, the verdict, and the command.

Everything is read from the results of the other commands. The table is written into docs/paper.md, between two marks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpformer.errors import DPFormerError
from dpformer_experiments.reproduce import common, paper
from dpformer_experiments.reproduce.comparisons import (
    Figures,
    Measured,
    cell_by_cell,
    curves,
    diagonal,
    gains,
    level,
    memory,
    speed,
    versus,
)
from dpformer_experiments.reproduce.page import Page

FILE = "paper.md"
BEGIN, END = "<!-- claims: made by `dpformer reproduce claims` -->", "<!-- end of claims -->"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, its place there, and how it is held against our figures."""

    text: str
    where: str
    measure: Callable[[Figures], Measured]
    command: str


CLAIMS = (
    Claim(
        "Sharing the embedding is essential under DP-SGD",
        "section on Phantom Clipping, heat maps",
        versus(paper.VANILLA, (paper.UNSHARED, common.HALVED), "common recipe"),
        "table-1, table-2, embedding-sharing",
    ),
    Claim(
        "Sharing is better at every batch size and rate",
        "section on Phantom Clipping, heat maps",
        cell_by_cell("embedding-sharing", "shared"),
        "embedding-sharing",
    ),
    Claim(
        "DPFormer is better at most batch sizes and rates (Amazon)",
        "figure of the grid search",
        cell_by_cell("grid", "DPFormer"),
        "grid",
    ),
    Claim(
        "The Transformer outperforms GRU and LSTM",
        "both tables",
        versus(paper.VANILLA, (paper.GRU, paper.LSTM), "common recipe"),
        "table-1, table-2",
    ),
    Claim(
        "Re-Attention gains 29 / 9 / 5 % (MovieLens) and 20 / 28 / 27 % (Amazon)",
        "both tables",
        gains,
        "table-1, table-2, reattention",
    ),
    Claim("DPFormer's level of accuracy", "both tables", level, "table-1, table-2"),
    Claim("Faster and smoother convergence with Re-Attention", "figure of convergence", curves, "convergence"),
    Claim("Large batches with large rates are best", "figure of the grid search", diagonal, "embedding-sharing, grid"),
    Claim(
        "4 to 100 times faster than Ghost Clipping", "figure of throughput", speed("opacus ghost", 4.0), "throughput"
    ),
    Claim("0.68 times the speed of non-private training", "text", speed("own non-private", 0.68), "throughput"),
    Claim("10 to 400 times larger batches than Ghost Clipping", "figure of memory", memory, "memory"),
)


def run(*, out: Path) -> dict[str, Any]:
    """Hold every claim against the results in `out`/results."""
    figures, rows = Figures(out / "results"), []
    for claim in CLAIMS:
        measured, verdict = claim.measure(figures)
        rows.append(
            {
                "claim": claim.text,
                "where": claim.where,
                "measured": measured,
                "verdict": verdict,
                "command": claim.command,
            }
        )
    return {"rows": rows}


def page(figures: dict[str, Any]) -> Page:
    """The table of claims."""
    rows = [
        (row["claim"], row["where"], row["measured"], f"**{row['verdict']}**", f"`reproduce {row['command']}`")
        for row in figures["rows"]
    ]
    return Page(
        "The paper's claims",
        "dpformer reproduce claims -o docs",
        ("claim", "in the paper", "measured here: NDCG@10 in %, test item", "verdict", "command"),
        rows,
    )


def write(figures: dict[str, Any], out: Path) -> list[Path]:
    """Put the table between the marks of `out`/paper.md."""
    path = out / FILE
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DPFormerError(f"{path}: lacks the marks {BEGIN} and {END}; put them where the table goes")
    path.write_text(f"{before}{BEGIN}\n\n{page(figures).grid()}\n\n{END}{after}", encoding="utf-8")
    return [path]

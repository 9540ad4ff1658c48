"""A page: the table and the notes of a result, for the terminal and as markdown; and csv, and figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class Part:
    """Some rows of a table under a heading of their own, with their protocol."""

    title: str
    protocol: str
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Page:
    """title, the command that makes it, a table of texts, and notes below it (the protocol is one of them).

    brief: how many of the columns a terminal shows; all by default. parts: the rows in parts, for markdown.
    """

    title: str
    command: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)
    brief: int | None = None
    parts: Sequence[Part] = ()

    def grid(self) -> str:
        """The table alone, in markdown; each part under its heading."""
        if not self.parts:
            return self._lines(self.rows)
        return "\n\n".join(f"### {part.title}\n\n{part.protocol}\n\n{self._lines(part.rows)}" for part in self.parts)

    def _lines(self, rows: Sequence[tuple[str, ...]]) -> str:
        lines = ["| " + " | ".join(self.headings) + " |", "|" + "---|" * len(self.headings)]
        return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])

    def markdown(self) -> str:
        """The whole page."""
        return "\n\n".join([f"# {self.title}", f"`{self.command}`", self.grid(), *self.notes]) + "\n"

    def table(self) -> Table:
        """The page for the terminal."""
        from rich.table import Table

        caption = "\n".join(self.notes)
        shown = self.headings[: self.brief]
        table = Table(*shown, title=self.title, title_justify="left", caption=caption, caption_justify="left")
        for row in self.rows:
            table.add_row(*row[: self.brief])
        return table


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Flat records as csv, with the columns of all of them; nested values are written as `outer.inner`."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(column for row in flat for column in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            result |= _flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return result


def new_figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.0)) -> tuple[Figure, Any]:
    """Make a figure without pyplot, and its axes [rows, columns]: no global state, no display needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def save_figure(figure: Figure, path: Path) -> None:
    """Write path.svg and path.png; the same figure gives the same files."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "dpformer"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=120)

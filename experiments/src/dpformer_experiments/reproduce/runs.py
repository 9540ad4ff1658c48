"""The file of finished cells, one line of JSON per cell. A cell with a line is not run again.

A line is added when its cell ends, and is on disk before the next cell is chosen. A crash can leave half a line at the end.
Reading leaves it out, and adding the next line removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from dpformer.errors import DPFormerError

FILE = "runs.jsonl"
Line = dict[str, Any]


class Runs:
    """The finished cells of a file, by key. The last line of a key counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Lines without a key are of runs that were started by `dpformer fit`: kept for their figures.
        lines = read_lines(path)
        self._lines = {line["key"]: line for line in lines if "key" in line}
        self._named = {_name(line): line for line in lines}

    def find(self, key: str, defaults: Line) -> Line | None:
        """The line of a cell; None if there is none, or if it was made with other defaults (or does not record its defaults)."""
        line = self._lines.get(key)
        made_with = line.get("defaults") if line is not None else None
        if made_with is None or any(defaults.get(name) != value for name, value in made_with.items()):
            return None
        return line

    def earlier(self, dataset: str, method: str, epsilon: float, seed: int) -> Line | None:
        """The last line of this name, whatever its settings: the figures of an earlier version."""
        return self._named.get((dataset, method, str(epsilon), seed))

    def add(self, line: Line) -> None:
        """Add a finished cell."""
        append_line(self._path, line)
        self._lines[line["key"]] = line


def _name(line: Line) -> tuple[str, str, str, int]:
    return line["dataset"], line["method"], str(line["epsilon"]), line["seed"]


def read_lines(path: Path) -> list[Line]:
    """JSON lines; half a line at the end is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n") and not _is_whole(lines[-1]):
        lines.pop()
    values = []
    for number, line in enumerate(lines, 1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise DPFormerError(f"{path}, line {number}: is not JSON ({error}); delete the line") from None
    return values


def append_line(path: Path, line: Line) -> None:
    """Add a line and sync it. Several processes may add to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _end_last_line(file)
        file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _end_last_line(file: Any) -> None:
    """Remove half a line; end a whole one that lacks only its newline."""
    file.seek(0)
    before, newline, last = file.read().rpartition(b"\n")
    if last and _is_whole(last):
        file.write(b"\n")
    elif last:
        file.truncate(len(before) + len(newline))


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True

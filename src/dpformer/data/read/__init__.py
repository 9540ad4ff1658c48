"""Open a log or a catalogue: its content decides the format, not its name alone."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from dpformer.data.read.columns import ITEM, TIME, TITLE, Wanted, is_alias
from dpformer.data.read.delimited import read_delimited
from dpformer.data.read.json_lines import looks_like_json, read_json_lines
from dpformer.data.read.log import SAMPLE_ROWS, Log
from dpformer.data.read.tables import read_frame, read_parquet
from dpformer.data.read.text import first_line_of, sample
from dpformer.data.read.times import looks_like_times
from dpformer.errors import DataError
from dpformer.where import condition


def read_log(log: Any, wanted: Wanted) -> Log:
    """Find the columns of a log without reading its events; titles are read only if requested.

    log: a path (file; folder or glob of Parquet files) or a pandas, polars or Arrow frame.
    """
    opened = _read(log, wanted)
    columns, title = dict(opened.columns), None
    if TITLE not in wanted.asked:
        title = columns.pop(TITLE, None)
    if wanted.where is not None:
        keep = condition(wanted.where, opened.schema())
        opened = replace(opened, frame=opened.frame.filter(keep.expression), raw=opened.frame, keep=keep)
    if not wanted.no_time and TIME not in wanted.asked:
        _check_unused_times(opened, columns, wanted.hints.get(TIME))
    return replace(opened, frame=wanted.select(opened.frame, columns), unused_title=title, columns=columns)


def read_items(items: Any, *, item: str | None = None, title: str | None = None) -> Log:
    """Find the columns of a catalogue, with one item per row, in any format of a log.

    item: the log's name for the item column, which the catalogue may have too. title: the column of titles.
    """
    wanted = Wanted({} if title is None else {TITLE: title}, items=True, hints={} if item is None else {ITEM: item})
    log = _read(items, wanted)
    return replace(log, frame=wanted.select(log.frame, log.columns))


def _check_unused_times(log: Log, columns: Mapping[str, str], before: str | None) -> None:
    """Refuse a log that seems to have times that would not be used: the order of events may be another one.

    before: the column of the times in an earlier log, which this one is read like.
    """
    used = columns.get(TIME)
    if used is not None and used == before:
        return
    sample = log.frame if log.sample is None else log.sample
    rows = log.collect(sample.head(SAMPLE_ROWS))
    for name in rows.columns:
        # Beside a column of times, a number may be anything, and another name for the time is the same time.
        if not name or name in columns.values() or (used is not None and is_alias(TIME, name)):
            continue
        if looks_like_times(rows[name], numbers=used is None):
            order, other = f"be sorted by {used!r}", f"--time {shlex.quote(used or '')}"
            if used is None:
                order, other = (
                    "stay in the order of the file",
                    "--no-time if the order of the file is the order of time",
                )
            raise DataError(
                f"{log.name}: column {name!r} looks like times and is not used, so events would {order}; give "
                f"--time {shlex.quote(name)}, or {other}"
            )
    if used is None and before is not None:
        raise DataError(
            f"{log.name}: has no column of times, unlike the log before (column {before!r}); name it with --time NAME, or give "
            "--no-time if the order of the file is the order of time"
        )


def _read(source: Any, wanted: Wanted) -> Log:
    if not isinstance(source, str | Path):
        return read_frame(source, wanted)
    try:
        return _read_path(str(source), wanted)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{source}: cannot be read ({reason}); check the path and its permissions") from None


def _read_path(name: str, wanted: Wanted) -> Log:
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.parquet") if file.is_file())
        if not files:
            raise DataError(f"{path}: is a folder without .parquet files; give the log file itself")
        return read_parquet(name, files, wanted)
    if not path.exists():
        return read_parquet(name, _matching(name, path), wanted)
    if _is_parquet(path) or path.suffix == ".parquet":
        return read_parquet(name, [path], wanted)
    text = sample(path)
    if looks_like_json(path, first_line_of(text)):
        return read_json_lines(path, wanted)
    return read_delimited(path, text, wanted)


def _matching(name: str, path: Path) -> list[Path]:
    """List the Parquet files that match a glob."""
    if not has_magic(name):
        raise DataError(f"{path}: no such file or folder; check the path")
    files = sorted(Path(match) for match in glob(str(path), recursive=True) if Path(match).is_file())
    if not files:
        raise DataError(f"{name}: no file matches; check the pattern, and quote it in the shell")
    for file in files:
        if not _is_parquet(file):
            raise DataError(f"{file}: is not a Parquet file; a glob reads only Parquet, so join other files into one")
    return files


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"

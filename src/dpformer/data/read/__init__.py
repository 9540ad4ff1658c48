"""Open a log or a catalogue: its content decides the format, not its name alone."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import polars as pl

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

    log: a path (file; folder or glob of Parquet or CSV files) or a pandas, polars or Arrow frame.
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
    files = _files(name)
    with files[0].open("rb") as file:
        if file.read(4) == b"PAR1" or files[0].suffix == ".parquet":
            return read_parquet(name, files, wanted)
    logs = [_read_text(file, wanted) for file in [file for file in files if file.stat().st_size] or files[:1]]
    return logs[0] if len(logs) == 1 else _joined(name, logs)


def _read_text(path: Path, wanted: Wanted) -> Log:
    text = sample(path)
    if looks_like_json(path, first_line_of(text)):
        return read_json_lines(path, wanted)
    return read_delimited(path, text, wanted)


def _files(name: str) -> list[Path]:
    """List the files of a log, in the order of their paths. Spark writes folders: names with _ or . in front are not data."""
    path = Path(name).expanduser()
    if path.is_dir():
        inside = [file for file in path.rglob("*") if not any(part[0] in "_." for part in file.relative_to(path).parts)]
        for kinds in ((".parquet",), (".csv", ".csv.gz")):
            if files := sorted(file for file in inside if file.name.endswith(kinds) and file.is_file()):
                return files
        raise DataError(f"{path}: is a folder without .parquet or .csv files; give the log file itself")
    if path.exists():
        return [path]
    if not has_magic(name):
        raise DataError(f"{path}: no such file or folder; check the path")
    if files := sorted(Path(match) for match in glob(str(path), recursive=True) if Path(match).is_file()):
        return files
    raise DataError(f"{name}: no file matches; check the pattern, and quote it in the shell")


def _joined(name: str, logs: list[Log]) -> Log:
    """One log of text files that are written alike."""
    first = logs[0]
    schema = first.schema()
    for log in logs[1:]:
        if (log.format, log.columns, log.schema()) != (first.format, first.columns, schema):
            raise DataError(
                f"{log.name}: has other columns than {first.name}; write all files alike, or give one of them"
            )
    frames, files = [log.frame for log in logs], tuple(log.files[0] for log in logs)
    form = f"{first.format}, {len(logs)} files"
    explain = partial(_fault, logs)
    return replace(
        first, frame=pl.concat(frames), name=name, format=form, explain=explain, files=files, parts=tuple(frames)
    )


def _fault(logs: list[Log], error: BaseException) -> DataError:
    """The error of the file that cannot be read. Only errors need this."""
    for log in logs:
        try:
            log.collect(log.frame.select(pl.len()))
        except DataError as fault:
            return fault
    return logs[0].explain(error)

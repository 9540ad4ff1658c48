"""Parquet: one file, a folder of them, or a glob."""

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

from dpformer.data.read.columns import Wanted, find_columns
from dpformer.data.read.log import READ_ERRORS, Log, first_line
from dpformer.errors import DataError


def scan(file: Path | str) -> pl.LazyFrame:
    """One file, by its name as it is: `[a]` is no pattern, and a folder may be called `user=7` without meaning a column."""
    return pl.scan_parquet(file, glob=False, hive_partitioning=False)


def read_parquet(name: str, files: Sequence[Path], wanted: Wanted) -> Log:
    """A log from Parquet files with one schema; their events follow one another in the order of `files`."""
    schema = _schema(files[0])
    columns = find_columns(list(schema), wanted, str(files[0]))
    used = {name: schema[name] for name in wanted.used(columns).values()}
    for file in files[1:]:
        other = _schema(file)
        for column, dtype in used.items():
            if other.get(column) != dtype:
                raise DataError(
                    f"{file}: column {column!r} is {other.get(column, 'missing')} and {dtype} in {files[0]}; "
                    "write all files with one schema"
                )
    return Log(
        # Read one by one: what else the files hold may differ.
        frame=pl.concat([wanted.select(scan(file), columns) for file in files]),
        name=name,
        files=tuple(files),
        format="Parquet" if len(files) == 1 else f"Parquet, {len(files)} files",
        columns=columns,
        untyped_ids=False,
        explain=lambda error: _fault(name, files, list(used), error),
        place=_place(files),
    )


def _schema(file: Path) -> dict[str, pl.DataType]:
    try:
        return dict(scan(file).collect_schema())
    except READ_ERRORS as error:
        raise _broken(file, error) from None


def _place(files: Sequence[Path]) -> Callable[[int], str]:
    """Names the file that holds an event, and its row there; counts rows only when asked."""

    def place(row: int) -> str:
        for file in files:
            rows = scan(file).select(pl.len()).collect().item()
            if row < rows:
                break
            row -= rows
        return f"{file}: row {row + 1}"

    return place


def _fault(name: str, files: Sequence[Path], used: list[str], error: BaseException) -> DataError:
    for file in files:
        try:
            scan(file).select(used).collect()
        except READ_ERRORS as fault:
            return _broken(file, fault)
    return DataError(f"{name}: cannot be read ({first_line(error)}); write the files again with one schema")


def _broken(file: Path, error: BaseException) -> DataError:
    return DataError(f"{file}: is no sound Parquet file ({first_line(error)}); copy or write it again")

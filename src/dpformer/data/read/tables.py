"""Tables with types: Parquet files, and polars, pandas and Arrow frames."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data.read.columns import Wanted, find_columns
from dpformer.data.read.log import READ_ERRORS, Log, first_line, scan
from dpformer.errors import DataError


def read_parquet(name: str, files: Sequence[Path], wanted: Wanted) -> Log:
    """Open Parquet files with one schema; events are in the order of `files`."""
    schema = _schema(files[0])
    columns = find_columns(list(schema), wanted, str(files[0]))
    used = {name: schema[name] for name in wanted.needed(columns, list(schema))}
    for file in files[1:]:
        other = _schema(file)
        for column, dtype in used.items():
            if other.get(column) != dtype:
                raise DataError(
                    f"{file}: column {column!r} is {other.get(column, 'missing')} and {dtype} in {files[0]}; "
                    "write all files with one schema"
                )
    # One by one, because columns that are not used may differ.
    parts = tuple(scan(file) if wanted.items else scan(file).select(list(used)) for file in files)
    form = "Parquet" if len(files) == 1 else f"Parquet, {len(files)} files"
    explain = functools.partial(_fault, name, files, list(used))
    return Log(pl.concat(parts), name, form, columns, explain, tuple(files), sample=scan(files[0]), parts=parts)


def _schema(file: Path) -> dict[str, pl.DataType]:
    try:
        return dict(scan(file).collect_schema())
    except READ_ERRORS as error:
        raise _broken(file, error) from None


def _fault(name: str, files: Sequence[Path], used: list[str], error: BaseException) -> DataError:
    for file in files:
        try:
            scan(file).select(used).collect()
        except READ_ERRORS as fault:
            return _broken(file, fault)
    return DataError(f"{name}: cannot be read ({first_line(error)}); write the files again with one schema")


def _broken(file: Path, error: BaseException) -> DataError:
    return DataError(f"{file}: is not a valid Parquet file ({first_line(error)}); copy or save it again")


def read_frame(frame: Any, wanted: Wanted) -> Log:
    """Open a polars frame (lazy or not), a pandas frame or an Arrow table."""
    lazy, name = _to_polars(frame), "catalogue frame" if wanted.items else "frame"
    columns = find_columns(lazy.collect_schema().names(), wanted, name)

    def explain(error: BaseException) -> DataError:
        return DataError(f"{name}: cannot be read ({first_line(error)}); check its columns' types")

    return Log(lazy, name, "frame", columns, explain)


def _to_polars(frame: Any) -> pl.LazyFrame:
    if isinstance(frame, pl.LazyFrame | pl.DataFrame):
        return frame.lazy()
    if type(frame).__module__.split(".")[0] == "pandas":
        return pl.LazyFrame({str(name): _from_pandas(name, frame[name]) for name in frame.columns})
    if hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "__arrow_c_array__"):
        return pl.DataFrame(frame).lazy()
    raise DataError(
        f"frame: a {type(frame).__name__} is not a log; give a path, or a pandas, polars or Arrow frame with the columns "
        "user_id, item_id and timestamp"
    )


def _from_pandas(name: Any, values: Any) -> pl.Series | pl.DataFrame:
    """Convert one column; if its types are mixed, the error names it. The index is not read."""
    if values.dtype == object:
        kinds = values[values.notna()].map(type)
        if kinds.nunique() > 1:
            row = int((values.notna() & (values.map(type) != kinds.iloc[0])).to_numpy().argmax())
            raise DataError(
                f"frame: row {row + 1}, column {name!r}: {type(values.iloc[row]).__name__} where the rows before "
                f"have {kinds.iloc[0].__name__}; make it one type: frame[{name!r}].astype(str)"
            )
    try:
        return pl.from_pandas(values.reset_index(drop=True), nan_to_null=True)
    except ImportError:
        raise DataError(f"frame: column {name!r} of pandas needs pyarrow; pip install 'dpformer[frames]'") from None
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise DataError(
            f"frame: column {name!r} cannot be read ({first_line(error)}); make it text or numbers"
        ) from None

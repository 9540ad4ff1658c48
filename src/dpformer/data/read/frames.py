"""A frame in memory as a log: polars, pandas, or anything that speaks Arrow."""

from typing import Any

import polars as pl

from dpformer.data.read.columns import Wanted, find_columns
from dpformer.data.read.log import Log, first_line
from dpformer.errors import DataError


def read_frame(frame: Any, wanted: Wanted) -> Log:
    """A log from a polars frame (lazy or not), a pandas frame or an Arrow table (or record batch)."""
    lazy, name = _to_polars(frame), wanted.frame
    columns = find_columns(lazy.collect_schema().names(), wanted, name)
    return Log(
        frame=wanted.select(lazy, columns),
        name=name,
        files=(),
        format="frame",
        columns=columns,
        untyped_ids=False,
        explain=lambda error: DataError(f"{name}: cannot be read ({first_line(error)}); check its columns' types"),
        place=lambda row: f"{name}: row {row + 1}",
    )


def _to_polars(frame: Any) -> pl.LazyFrame:
    if isinstance(frame, pl.LazyFrame):
        return frame
    if isinstance(frame, pl.DataFrame):
        return frame.lazy()
    if type(frame).__module__.split(".")[0] == "pandas":
        return _from_pandas(frame)
    if hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "__arrow_c_array__"):
        return pl.DataFrame(frame).lazy()
    raise DataError(
        f"frame: a {type(frame).__name__} is no log; give a path, or a pandas, polars or Arrow frame with the columns "
        "user_id, item_id and timestamp"
    )


def _from_pandas(frame: Any) -> pl.LazyFrame:
    """Column by column, so that one of mixed types can be named; the index is not part of the log."""
    columns = {}
    for name in frame.columns:
        values = frame[name]
        if values.dtype == object:
            present = values[values.notna()]
            kinds = present.map(type)
            if len(present) and kinds.nunique() > 1:
                row = int((values.notna() & (values.map(type) != kinds.iloc[0])).to_numpy().argmax())
                raise DataError(
                    f"frame: row {row + 1}, column {name!r}: {type(values.iloc[row]).__name__} where the rows before "
                    f"have {kinds.iloc[0].__name__}; make it one type: frame[{name!r}].astype(str)"
                )
        try:
            columns[str(name)] = pl.from_pandas(values.reset_index(drop=True), nan_to_null=True)
        except ImportError:
            raise DataError(f"frame: column {name!r} of pandas needs pyarrow; pip install 'dpformer[frames]'") from None
        except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
            raise DataError(
                f"frame: column {name!r} cannot be read ({first_line(error)}); make it text or numbers"
            ) from None
    return pl.LazyFrame(columns)

"""`dpformer recommend`: ranked items from a released model, for a history or a file of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpformer.cli.reading import reads_log

if TYPE_CHECKING:
    import polars as pl

    from dpformer.artifact import Artifact
    from dpformer.data import Dataset

_ROWS = 4096


@reads_log(where="--log-where")
def recommend(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    history: Annotated[
        str | None,
        typer.Option(help="Ids or titles of items, oldest first, separated by commas (a title may hold some)."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", help="A log, read like the one the model was fitted on, or a prepared folder: one list per user."
        ),
    ] = None,
    users: Annotated[str | None, typer.Option(help="With --file: only these users, separated by commas.")] = None,
    k: Annotated[int, typer.Option("-k", help="How many items.")] = 10,
    seen: Annotated[bool, typer.Option("--seen", help="Recommend items of the history too.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to a .csv, .parquet or .jsonl file instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Rank all items as the next one after a history. Works for people whom the model has never seen."""
    import polars as pl

    from dpformer.artifact import load
    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.errors import DPFormerError

    if (history is None) == (file is None):
        raise DPFormerError("give either --history or --file")
    if users is not None and file is None:
        raise DPFormerError("--users chooses from a log: give it with --file")
    if output is not None and output.suffix not in (".csv", ".parquet", ".jsonl"):
        raise DPFormerError(f"{output}: write to a .csv, .parquet or .jsonl file")
    model = load(run)
    if history is not None:
        items = model.split(history)
        numbers, unknown = model.encode(items)
        for item in unknown:
            stderr.print(f"not in the catalogue, skipped: {item}", markup=False)
        if not numbers:
            stderr.print(f"no known item in the history: ranked by {model.cold_start}")
        parts = iter([model.recommend([items], k, seen).drop("history")])
    else:
        assert file is not None
        parts = _for_users(model, _dataset(model, file, reading), users, k, seen)
    if output is not None:
        stderr.print(f"{_write(parts, output):,} rows written to {output}", markup=False)
        return
    frame = pl.concat(parts)
    if as_json:
        print_json(frame.to_dicts())
    else:
        stdout.print(_table(frame))


def _dataset(model: Artifact, file: Path, reading: dict[str, Any]) -> Dataset:
    """The histories of a log or of a prepared folder."""
    from dpformer.cli.output import stderr
    from dpformer.cli.prepare import how_read
    from dpformer.data import like, load, prepare
    from dpformer.errors import DPFormerError

    if file.is_dir() and (file / "manifest.json").exists():
        if reading:
            raise DPFormerError(f"{file}: is prepared already; leave out the options that say how a log is read")
        return load(file)
    dataset = prepare(str(file), **like(model.log, single_events=True, **reading))
    stderr.print(how_read(dataset.manifest), markup=False, soft_wrap=True)
    return dataset


def _for_users(model: Artifact, dataset: Dataset, wanted: str | None, k: int, seen: bool) -> Iterator[pl.DataFrame]:
    """The recommendations, some thousand users at a time, so that a file of any size can be written."""
    import polars as pl

    from dpformer.cli.output import stderr
    from dpformer.errors import DPFormerError

    asked = None if wanted is None else [user.strip() for user in wanted.split(",")]
    places, missing = dataset.sequences.places(asked)
    if missing and not len(places):
        raise DPFormerError(f"the log has no user {missing[0]!r}; check --users")
    numbers = dataset.numbers_in(model.catalogue)
    unknown = dataset.catalogue["item_id"].filter(pl.Series(numbers[1:] == 0))
    for what, left_out in (("not in the log, left out", missing), ("not in the catalogue, skipped", unknown.to_list())):
        if left_out:
            shown = ", ".join(map(str, left_out[:5])) + (", ..." if len(left_out) > 5 else "")
            stderr.print(f"{what}: {len(left_out):,} ({shown})", markup=False, soft_wrap=True)
    sequences = dataset.sequences.renumbered(numbers)
    for start in range(0, len(places), _ROWS):
        chosen = places[start : start + _ROWS]
        part = model.frame(*model.rank([sequences[n].tolist() for n in chosen], k, seen))
        who = sequences.users[chosen][part["history"]].alias("user_id")
        yield part.drop("history").insert_column(0, who)


def _write(parts: Iterator[pl.DataFrame], output: Path) -> int:
    """Write part after part, aside, and put the file in place when it is whole; returns the number of rows."""
    import tempfile

    import polars as pl

    from dpformer.errors import DPFormerError

    rows = 0
    try:
        with tempfile.TemporaryDirectory(prefix=".dpformer-", dir=output.resolve().parent) as folder:
            aside = Path(folder) / output.name
            if output.suffix == ".parquet":
                for number, part in enumerate(parts):
                    part.write_parquet(Path(folder) / f"part-{number:08d}.parquet")
                    rows += len(part)
                pl.scan_parquet(Path(folder) / "part-*.parquet").sink_parquet(aside)
            else:
                with open(aside, "wb") as file:
                    for part in parts:
                        if output.suffix == ".csv":
                            _flat(part).write_csv(file, include_header=rows == 0)
                        else:
                            part.write_ndjson(file)
                        rows += len(part)
            aside.replace(output)
    except OSError as error:
        raise DPFormerError(f"{output}: cannot be written ({error.strerror or error})") from None
    return rows


def _flat(frame: pl.DataFrame) -> pl.DataFrame:
    """Lists and objects of the catalogue as JSON text: CSV has no place for them."""
    import json

    import polars as pl

    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    texts = [
        pl.Series(name, [json.dumps(cell, default=str) for cell in frame[name].to_list()], dtype=pl.String)
        for name in nested
    ]
    return frame.with_columns(texts)


def _table(frame: pl.DataFrame) -> Any:
    from rich.table import Table

    table = Table(*frame.columns)
    for row in frame.head(200).iter_rows():
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    if len(frame) > 200:
        table.caption = f"the first 200 of {len(frame):,} rows; write all with -o FILE"
    return table

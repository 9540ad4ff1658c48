"""`dpformer recommend` and `dpformer similar`: ranked items from a released model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from dpformer.cli.options import AsJson, RunFolder, reads_log
from dpformer.cli.output import print_json, say, stdout, threads
from dpformer.cli.prepare import how_read
from dpformer.cli.progress import counting
from dpformer.errors import DataError, DPFormerError

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

    from dpformer.artifact import Artifact
    from dpformer.data import Dataset
    from dpformer.models.top import Best

_ROWS = 16_384
Count = Annotated[int, Option("-k", help="How many items.")]
Only = Annotated[
    str | None, Option(help="Of these items alone: ids or titles separated by commas, or @FILE with one per line.")
]
Exclude = Annotated[str | None, Option(help="None of these items; as --only.")]
Where = Annotated[
    str | None,
    Option(help="An SQL condition on columns of the catalogue, such as \"category = 'Drama' and in_stock\"."),
]


@reads_log(where="--log-where")
def recommend(
    run: RunFolder,
    history: Annotated[
        str | None, Option(help="Ids or titles of items, oldest first, separated by commas (a title may hold some).")
    ] = None,
    file: Annotated[
        Path | None,
        Option(
            "--all",
            "--file",
            help="A log, read like the one the model was fitted on, or a prepared folder: one list per user.",
        ),
    ] = None,
    users: Annotated[str | None, Option(help="With --all: only these users, separated by commas.")] = None,
    k: Count = 10,
    seen: Annotated[bool, Option("--seen", help="Recommend items of the history too.")] = False,
    only: Only = None,
    exclude: Exclude = None,
    where: Where = None,
    exclude_for: Annotated[
        Path | None, Option(help="With --all: a table of users and items that they are not to get.")
    ] = None,
    output: Annotated[
        Path | None, Option("-o", "--output", help="Write to a .csv, .parquet or .jsonl file instead.")
    ] = None,
    as_json: AsJson = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Rank all items as the next one after a history. Works for people whom the model has never seen."""
    import polars as pl

    from dpformer.artifact import load

    if (history is None) == (file is None):
        raise DPFormerError("give either --history or --all")
    if (users is not None or exclude_for is not None) and file is None:
        raise DPFormerError("--users and --exclude-for name users of a log: give them with --all")
    if output is not None and output.suffix not in (".csv", ".parquet", ".jsonl"):
        raise DPFormerError(f"{output}: write to a .csv, .parquet or .jsonl file")
    model = load(run)
    try:
        allowed, unknown = model.allowed(_names(model, only), _names(model, exclude) or (), where)
    except DataError as error:
        hint = "" if file is None else " (--where is for items; a condition on events of the log is --log-where)"
        raise DataError(f"{error.typed}{hint}") from None
    _say_unknown("in --only or --exclude and not in the catalogue", unknown)
    if allowed is not None and not allowed.any():
        raise DPFormerError("no item of the catalogue passes --only, --exclude and --where; change them")
    if history is not None:
        numbers, unknown = model.encode(model.split(history))
        say(*(f"not in the catalogue, skipped: {item}" for item in unknown))
        if not numbers:
            say(f"no known item in the history: ranked by {model.cold_start}")
        frame = model.frame(*model.rank([numbers], k, seen, allowed)).drop("history")
        parts, people = iter([frame]), 1
        _say_short(int(len(frame) < k), 1, k)
    else:
        assert file is not None
        dataset = _dataset(model, file, reading)
        places = _chosen(dataset, users)
        own = {} if exclude_for is None else _exclusions(model, dataset, exclude_for)
        parts, people = _for_users(model, dataset, places, own, model.best(k, allowed), k, seen), len(places)
    if output is not None:
        rows = _write(parts, output)
        say(f"{rows:,} rows for {people:,} lists written to {output}")
        return
    _print(pl.concat(parts), as_json)


def similar(
    run: RunFolder,
    item: Annotated[str, Argument(help="An item id or a title.")],
    k: Count = 10,
    only: Only = None,
    exclude: Exclude = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Show the items most like an item, by the released model alone: no people's data is read."""
    from dpformer.artifact import load

    model = load(run)
    frame = model.similar(item, k, _names(model, only), _names(model, exclude) or (), where)
    _say_short(int(len(frame) < k), 1, k)
    _print(frame, as_json)


def _dataset(model: Artifact, file: Path, reading: dict[str, Any]) -> Dataset:
    """The histories of a log or of a prepared folder."""
    from dpformer.data import like, load, prepare

    if file.is_dir() and (file / "manifest.json").exists():
        if reading:
            raise DPFormerError(f"{file}: is prepared already; leave out the options that say how a log is read")
        return load(file)
    dataset = prepare(str(file), **like(model.log, single_events=True, **reading))
    lines = how_read(dataset.manifest, "the condition on the log (--log-where)")
    say(*lines, *(["people who have no other events get no list"] if len(lines) > 1 else []))
    return dataset


def _chosen(dataset: Dataset, wanted: str | None) -> np.ndarray:
    """Places of the users, all or those that are wanted; those that are not in the log are named."""
    asked = None if wanted is None else [user.strip() for user in wanted.split(",")]
    places, missing = dataset.sequences.places(asked)
    if missing and not len(places):
        raise DPFormerError(f"the log has no user {missing[0]!r}; check --users")
    _say_unknown("not in the log, left out", missing)
    return places


def _exclusions(model: Artifact, dataset: Dataset, file: Path) -> dict[int, np.ndarray]:
    """The items that each user of the data, by place, is not to get. The table has the columns of the log, without times."""
    from dpformer.data import like, prepare

    columns = {"columns": model.log.get("columns", {})}
    try:
        table = prepare(str(file), **like(columns, single_events=True, no_time=True))
    except DataError as error:
        names = [repr(name) for role, name in columns["columns"].items() if role in ("user_id", "item_id")]
        hint = f"--user and --item are for the log; the columns of this table are called as in the first log: {', '.join(names)}"
        raise DataError(f"{error.typed} ({hint})") from None
    lists = table.sequences.renumbered(table.numbers_in(model.catalogue))
    places, missing = dataset.sequences.places(lists.users)
    _say_unknown(f"users of {file} who are not in the log", missing)
    gone = set(missing)
    inside = [n for n, user in enumerate(lists.users) if user not in gone]
    return {int(place): lists[n] for place, n in zip(places, inside, strict=True)}


def _for_users(
    model: Artifact, dataset: Dataset, places: np.ndarray, own: dict[int, np.ndarray], best: Best, k: int, seen: bool
) -> Iterator[pl.DataFrame]:
    """The recommendations, some thousand users at a time, so that a file of any size can be written. own: exclusions."""
    import polars as pl

    from dpformer.artifact.artifact import without

    numbers, workers, short = dataset.numbers_in(model.catalogue), threads(), 0
    unknown = dataset.catalogue["item_id"].filter(pl.Series(numbers[1:] == 0))
    _say_unknown("not in the catalogue, skipped", unknown.to_list())
    sequences = dataset.sequences.renumbered(numbers)
    with counting("people", len(places)) as done:
        for start in range(0, len(places), _ROWS):
            chosen = places[start : start + _ROWS]
            histories = [sequences[n] for n in chosen]
            left_out = [own.get(int(n), ()) for n in chosen] if own else None
            ranked = best.rank(model.read(histories), without(histories, seen, left_out), workers)
            short += int((ranked[0][:, -1] == 0).sum()) if k <= model.item_count else len(chosen)
            part = model.frame(*ranked)
            who = sequences.users[chosen][part["history"]].alias("user_id")
            yield part.drop("history").insert_column(0, who)
            done(start + len(chosen))
    _say_short(short, len(places), k)


def _names(model: Artifact, given: str | None) -> list[str] | None:
    """Ids or titles of an option: a text with commas, or @FILE with one per line."""
    if given is None or not given.startswith("@"):
        return None if given is None else model.split(given)
    try:
        lines = Path(given[1:]).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise DPFormerError(f"{given[1:]}: cannot be read ({reason}); give @FILE with one item per line") from None
    return [line.strip() for line in lines if line.strip()]


def _say_unknown(what: str, names: list[Any]) -> None:
    if names:
        say(f"{what}: {len(names):,} ({', '.join(map(str, names[:5]))}{', ...' if len(names) > 5 else ''})")


def _say_short(short: int, lists: int, k: int) -> None:
    if short:
        say(f"{short:,} of {lists:,} lists have fewer than {k} items: no more pass")


def _write(parts: Iterator[pl.DataFrame], output: Path) -> int:
    """Write part after part, aside, and put the file in place when it is whole; returns the number of rows."""
    import polars as pl

    from dpformer.data.store import polars_writes

    rows = 0
    try:
        with tempfile.TemporaryDirectory(prefix=".dpformer-", dir=output.resolve().parent) as folder:
            aside = Path(folder) / output.name
            for number, part in enumerate(parts):
                with polars_writes():
                    part.write_parquet(Path(folder) / f"{number:08d}.part")
                rows += len(part)
            whole = pl.scan_parquet(Path(folder) / "*.part")
            sinks: dict[str, Any] = {
                ".csv": whole.sink_csv,
                ".parquet": whole.sink_parquet,
                ".jsonl": whole.sink_ndjson,
            }
            with polars_writes():
                sinks[output.suffix](aside)
            aside.replace(output)
    except OSError as error:
        cure = "check the folder, its permissions and the space left on its disk, or choose another with -o"
        raise DPFormerError(f"{output}: cannot be written ({error.strerror or error}); {cure}") from None
    return rows


def _print(frame: pl.DataFrame, as_json: bool) -> None:
    if as_json:
        print_json(frame.to_dicts())
        return
    table = Table(*frame.columns)
    for row in frame.head(200).iter_rows():
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    if len(frame) > 200:
        table.caption = f"the first 200 of {len(frame):,} rows; write all with -o FILE"
    stdout.print(table)

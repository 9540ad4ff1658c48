"""`dpformer prepare`: prepare a log, and print statistics."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpformer.cli.options import reads_log

if TYPE_CHECKING:
    from rich.table import Table


@reads_log()
def prepare(
    log: Annotated[
        str,
        typer.Argument(help="A log (file; folder or glob of Parquet files), or a data set: ml-1m, amazon-games, demo."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    catalogue: Annotated[
        str | None,
        typer.Option(
            help="Which items there are: a FILE of public items, one per row, with titles; `private`: fit selects items by "
            "noisy counts; `log` (default): all items of the log, assumed public.",
            metavar="FILE|private|log",
        ),
    ] = None,
    title: Annotated[
        str | None,
        typer.Option(
            help="Column of item titles; titles are published with a model. Titles of a log are outside of the guarantee."
        ),
    ] = None,
    min_events: Annotated[
        int | None,
        typer.Option("--min-events", help="Smallest number of events per user and item. Outside the guarantee."),
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--filter", help="Count once (single-pass, default) or repeatedly (iterative).")
    ] = None,
    min_user_events: Annotated[
        int | None,
        typer.Option("--min-user-events", help="Smallest number of events per user; other users stay, without events."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Held out for evaluation: each user's last items (leave-one-out, default), or events from --date on (time)."
        ),
    ] = None,
    date: Annotated[str | None, typer.Option(help="For --split time, such as 2025-02-01 (UTC).")] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="The file of a named data set, instead of a download.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="polars, or spark for a log larger than this machine; the result is the same."),
    ] = "polars",
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that prepare wrote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Turn a log (who, what, when) into sequences, with statistics and a plot of the long tail."""
    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.data import prepare as prepare_log
    from dpformer.data import prepare_named, save, statistics
    from dpformer.data.named import DEMO, NAMED
    from dpformer.data.store import PLOT, check_target
    from dpformer.errors import DataError

    if engine not in ("polars", "spark"):
        raise DataError(f"--engine {engine} is unknown; give polars or spark")
    check_target(output, force)
    given: dict[str, Any] = {
        "catalogue": catalogue,
        "title": title,
        "min_events": min_events,
        "filter": rule,
        "min_user_events": min_user_events,
        "split": split,
        "date": date,
    }
    options = reading | {name: value for name, value in given.items() if value is not None}
    named = log in NAMED or log == DEMO
    if named and options:
        raise DataError(
            f"{log} has its own columns and filter; to change them, prepare its file as a log of your own "
            f"(for a file called {log}: ./{log})"
        )
    if named and engine == "spark":
        raise DataError(f"{log} is small; leave out --engine spark")
    if not named and source is not None:
        raise DataError(f"--from is for named data sets ({', '.join(NAMED)}); give {source} itself as the log")
    if rule is not None and min_events is None:
        raise DataError(f"--filter {rule} needs a number of events; add --min-events N")
    with stderr.status("") as status:

        def show(stage: str) -> None:
            status.update(f"{stage} ...")

        if engine == "spark":
            from dpformer.data.spark import prepare_spark

            manifest = prepare_spark(log, output, force=force, on_stage=show, **options)
            figures = manifest.pop("statistics")
        else:
            dataset = prepare_named(log, source, on_stage=show) if named else prepare_log(log, on_stage=show, **options)
            show("writing")
            save(dataset, output, force=force)
            manifest, figures = dataset.manifest, statistics(dataset)
    if as_json:
        print_json({**figures, "output": str(output), "manifest": manifest})
        return
    print_summary(manifest)
    stdout.print(statistics_table(figures))
    stderr.print(f"written to {output} (long tail drawn in {output / PLOT})", markup=False, soft_wrap=True)


def print_summary(manifest: dict[str, Any]) -> None:
    """Print to stderr how the log was read and what was removed."""
    from dpformer.cli.output import stderr

    counts, options = manifest["counts"], manifest["options"]
    lines = [how_read(manifest)]
    if "dataset" in manifest:
        lines.insert(0, f"licence: {manifest['dataset']['licence']}")
    for step, why in (("where", "that --where does not keep"), ("missing", "without user, item or time")):
        if counts.get(step):
            lines.append(f"dropped {counts[step]:,} events {why}")
    lines.append(f"found {_amounts(counts['read'])}")
    if "duplicates" in counts:
        lines.append(f"dropped {counts['duplicates']:,} duplicate events")
    if counts.get("outside_catalogue"):
        source_name = manifest["catalogue"]["source"]
        lines.append(
            f"dropped {counts['outside_catalogue']:,} events of items that are not in the catalogue {source_name}"
        )
    if "emptied" in counts:
        lines.append(
            f"{counts['emptied']['users']:,} users with fewer than {options['min_user_events']} events stay without "
            f"events ({counts['emptied']['events']:,} dropped)"
        )
    if "removed" in counts:
        lines.append(
            f"removed {_amounts(counts['removed'])} (at least {options['min_events']} events, {options['filter']})"
        )
    outside = [f"outside of the guarantee: {sentence}" for sentence in manifest["outside_guarantee"]]
    for line in [*lines, *manifest["notes"], *outside]:
        stderr.print(line, markup=False, soft_wrap=True)


def how_read(manifest: dict[str, Any]) -> str:
    """How the log was understood: format, columns, times."""
    source = manifest["input"]
    columns = ", ".join(f"{role.removesuffix('_id')} = {name}" for role, name in source["columns"].items())
    when = (
        f"times as {source['time']}, {source['from']} to {source['to']}" if source["time"] else "no times: file order"
    )
    return f"read {source['format']}: {columns}; {when}"


def _amounts(sizes: dict[str, int]) -> str:
    return f"{sizes['users']:,} users, {sizes['items']:,} items, {sizes['events']:,} events"


def statistics_table(figures: dict[str, Any]) -> "Table":
    """Format the statistics as a table."""
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for key in ("users", "items", "events"):
        table.add_row(key, f"{figures[key]:,}")
    table.add_row("density", f"{figures['density']:.4%}")
    table.add_row("users to evaluate", f"{figures['evaluated_users']:,}")
    table.add_row("users left out of evaluation", f"{figures['short_users']:,}")
    table.add_section()
    table.add_row("mean length", f"{figures['length']['mean']:.1f}")
    for row in (("shortest", "p10", "p25", "median"), ("p75", "p90", "p99", "longest")):
        table.add_row("length " + " / ".join(row), " / ".join(f"{figures['length'][key]:.0f}" for key in row))
    table.add_section()
    tail = figures["tail"]
    table.add_row("events of the most frequent 10 % of items", f"{tail['events_of_top_tenth']:.1%}")
    table.add_row("items making up the last 20 % of events", f"{tail['items_of_last_fifth_of_events']:.1%}")
    table.add_row("items with at most 10 events", f"{tail['items_with_at_most_10_events']:.1%}")
    table.add_row("Gini of items", f"{tail['gini']:.3f}")
    return table

"""`dpformer prepare`: prepare a log, and print statistics."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option

from dpformer.cli.options import AsJson, reads_log
from dpformer.cli.output import print_json, say, stderr, stdout
from dpformer.errors import DataError


@reads_log(prepares=True)
def prepare(
    log: Annotated[
        str,
        Argument(
            help="A log (file; folder or glob of Parquet or CSV files), or a data set: ml-1m, amazon-games, demo."
        ),
    ],
    output: Annotated[Path, Option("-o", "--output", help="Folder to write.")],
    source: Annotated[str | None, Option("--from", help="The file of a named data set, instead of a download.")] = None,
    force: Annotated[bool, Option("--force", help="Replace a folder that prepare wrote.")] = False,
    as_json: AsJson = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Turn a log (who, what, when) into sequences, with statistics and a plot of the long tail."""
    from dpformer.data import prepare as prepare_log
    from dpformer.data import prepare_named, save, statistics
    from dpformer.data.named import DEMO, NAMED
    from dpformer.data.store import PLOT, check_target

    check_target(output, force)
    named = log in NAMED or log == DEMO
    if named and reading:
        raise DataError(
            f"{log} has its own columns and filter; to change them, prepare its file as a log of your own "
            f"(for a file called {log}: ./{log})"
        )
    if not named and source is not None:
        raise DataError(f"--from is for named data sets ({', '.join(NAMED)}); give {source} itself as the log")
    if "filter" in reading and "min_events" not in reading:
        raise DataError(f"--filter {reading['filter']} needs a number of events; add --min-events N")
    with stderr.status("") as status:

        def stage(name: str) -> None:
            status.update(f"{name} ...")

        make = functools.partial(prepare_named, log, source) if named else functools.partial(prepare_log, log)
        dataset = make(on_stage=stage, **reading)
        stage("writing")
        save(dataset, output, force=force)
    manifest, figures = dataset.manifest, statistics(dataset)
    if as_json:
        print_json({**figures, "output": str(output), "manifest": manifest})
        return
    print_summary(manifest)
    stdout.print(statistics_table(figures))
    say(f"written to {output} (long tail drawn in {output / PLOT})")


def print_summary(manifest: dict[str, Any]) -> None:
    """Print to stderr how the log was read and what was removed."""
    counts, options = manifest["counts"], manifest["options"]
    if "dataset" in manifest:
        say(f"licence: {manifest['dataset']['licence']}")
    say(*how_read(manifest))
    say(f"found {_amounts(counts['read'])}")
    if "duplicates" in counts:
        say(f"dropped {counts['duplicates']:,} duplicate events")
    if outside := counts.get("outside_catalogue"):
        say(f"dropped {outside:,} events of items that are not in the catalogue {manifest['catalogue']['source']}")
    if emptied := counts.get("emptied"):
        fewer = f"{emptied['users']:,} users with fewer than {options['min_user_events']} events"
        say(f"{fewer} stay without events ({emptied['events']:,} dropped)")
    if "removed" in counts:
        least = f"at least {options['min_events']} events, {options['filter']}"
        say(f"removed {_amounts(counts['removed'])} ({least})")
    say(*manifest["notes"], *(f"outside of the guarantee: {sentence}" for sentence in manifest["outside_guarantee"]))


def how_read(manifest: dict[str, Any], where: str = "--where") -> list[str]:
    """How the log was understood, in lines: format, columns, times, and the events that were dropped while it was read.

    where: the option that holds the condition on events.
    """
    source, counts = manifest["input"], manifest["counts"]
    columns = ", ".join(f"{role.removesuffix('_id')} = {name}" for role, name in source["columns"].items())
    times = f"times as {source['time']}, {source['from']} to {source['to']}" if source["time"] else ""
    dropped = {"where": f"that {where} does not keep", "missing": "without user, item or time"}
    lost = [f"dropped {counts[step]:,} events {why}" for step, why in dropped.items() if counts.get(step)]
    return [f"read {source['format']}: {columns}; {times or 'no times: file order'}", *lost]


def _amounts(sizes: dict[str, int]) -> str:
    return f"{sizes['users']:,} users, {sizes['items']:,} items, {sizes['events']:,} events"


def statistics_table(figures: dict[str, Any]) -> Table:
    """Format the statistics as a table."""
    length, tail = figures["length"], figures["tail"]
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for key in ("users", "items", "events"):
        table.add_row(key, f"{figures[key]:,}")
    table.add_row("density", f"{figures['density']:.4%}")
    table.add_row("users to evaluate", f"{figures['evaluated_users']:,}")
    table.add_row("users left out of evaluation", f"{figures['short_users']:,}", end_section=True)
    table.add_row("mean length", f"{length['mean']:.1f}")
    for keys in (("shortest", "p10", "p25", "median"), ("p75", "p90", "p99", "longest")):
        table.add_row("length " + " / ".join(keys), " / ".join(f"{length[key]:.0f}" for key in keys))
    table.add_section()
    table.add_row("events of the most frequent 10 % of items", f"{tail['events_of_top_tenth']:.1%}")
    table.add_row("items making up the last 20 % of events", f"{tail['items_of_last_fifth_of_events']:.1%}")
    table.add_row("items with at most 10 events", f"{tail['items_with_at_most_10_events']:.1%}")
    table.add_row("Gini of items", f"{tail['gini']:.3f}")
    return table

"""What is said of a log once its events are counted and sorted, whichever engine did that: checks, manifest."""

from typing import Any

from dpformer import __version__
from dpformer.data.columns import ITEM, TIME, TITLE, USER
from dpformer.data.filters import Filter
from dpformer.data.log import Log
from dpformer.data.splits import SHORTEST_SPLIT
from dpformer.data.times import Unit
from dpformer.errors import DataError

MANIFEST_FORMAT, MANIFEST_VERSION = "dpformer-sequences", 1


def checked_options(min_events: int, filter: Filter | str) -> Filter:
    """The rule of the filter, if the options make sense."""
    if min_events < 0:
        raise DataError(f"--min-events {min_events} is negative; give 0 (keep all) or more")
    try:
        return Filter(filter)
    except ValueError:
        raise DataError(f"--filter {filter!r} is unknown; give {' or '.join(rule.value for rule in Filter)}") from None


def no_rows(log: Log) -> DataError:
    """The line about a log without events."""
    return DataError(f"{log.name}: has no rows; give a log with at least one event")


def nothing_left(log: Log, events: int, min_events: int, rule: Filter) -> DataError:
    """The line about a filter that removes all of `events`."""
    return DataError(
        f"{log.name}: no event is left of {events:,} after --min-events {min_events} ({rule.value}); lower it"
    )


def time_origin(unit: Unit, first: float, last: float) -> dict[str, Any]:
    """What the manifest says of the times."""
    return {"time": unit.name, "from": unit.text(first), "to": unit.text(last)}


def count_lengths(log: Log, users: int, longest: int, short: int, counts: dict[str, Any], notes: list[str]) -> None:
    """Who can be evaluated; nobody with two events means that there is no sequence at all.

    short: users with fewer than three events.
    """
    if longest < 2 and "removed" in counts:
        raise DataError(
            f"{log.name}: nobody has two events left after the filter, so there are no sequences; lower --min-events"
        )
    if longest < 2:
        raise DataError(
            f"{log.place(0)}, column {log.columns[USER]!r}: this user has one event, as all {users:,} have, so "
            "there are no sequences; is this the column of the user? (--user NAME)"
        )
    counts["evaluated_users"], counts["short_users"] = users - short, short
    if short:
        notes.append(
            f"{short:,} of {users:,} users have fewer than {SHORTEST_SPLIT} events: they stay in training and "
            "are left out of evaluation"
        )


def make_manifest(
    log: Log,
    sha256: str | None,
    origin: dict[str, Any],
    options: dict[str, Any],
    counts: dict[str, Any],
    notes: list[str],
) -> dict[str, Any]:
    """Where the sequences come from and what was done. options: min_events, filter, dedupe."""
    source = {
        "name": log.name,
        "format": log.format,
        "files": len(log.files),
        "bytes": sum(file.stat().st_size for file in log.files),
        "sha256": sha256,
        "columns": {role: name for role, name in log.columns.items() if role in (USER, ITEM, TIME, TITLE)},
    }
    rule = options["filter"].value if options["min_events"] > 1 else None
    return {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "dpformer": __version__,
        "input": source | origin,
        "options": {**options, "filter": rule},
        "counts": counts,
        "notes": notes,
    }

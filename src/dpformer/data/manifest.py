"""What is said of a log once its events are counted and sorted, whichever engine did that: checks, manifest."""

from typing import Any

import numpy as np

from dpformer import __version__
from dpformer.data.catalogue import PRIVATE, PUBLIC, Catalogue, title_notes
from dpformer.data.filters import Filter
from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.data.read.log import Log
from dpformer.data.read.times import Unit
from dpformer.data.sequences import SHORTEST_SPLIT
from dpformer.errors import DataError

MANIFEST_FORMAT, MANIFEST_VERSION = "dpformer-sequences", 1


class Options:
    """What `prepare` is asked to leave out: see its arguments."""

    def __init__(self, min_events: int, filter: Filter | str, min_user_events: int, dedupe: bool) -> None:
        for option, value in (("--min-events", min_events), ("--min-user-events", min_user_events)):
            if value < 0:
                raise DataError(f"{option} {value} is negative; give 0 (keep all) or more")
        try:
            self.filter = Filter(filter)
        except ValueError:
            rules = " or ".join(rule.value for rule in Filter)
            raise DataError(f"--filter {filter!r} is unknown; give {rules}") from None
        self.min_events, self.min_user_events, self.dedupe = min_events, min_user_events, dedupe

    def entry(self) -> dict[str, Any]:
        """What the manifest says of them."""
        return {
            "min_events": self.min_events,
            "filter": self.filter.value if self.min_events > 1 else None,
            "min_user_events": self.min_user_events,
            "dedupe": self.dedupe,
        }

    def outside_guarantee(self) -> list[str]:
        """What was done to the events that the guarantee for one person does not cover."""
        if self.min_events <= 1:
            return []
        return [
            f"items and users were filtered by --min-events {self.min_events}, which counts over people: one person's "
            "events decide whether events of other people stay"
        ]


def check_together(options: Options, catalogue: Catalogue, titles: object) -> None:
    """Refuse options that contradict the catalogue."""
    if catalogue.mode == PRIVATE and options.min_events > 1:
        raise DataError(
            f"--min-events {options.min_events} cannot be used with --catalogue private: it counts over people; leave it "
            "out (fit drops rare items by noisy counts), or filter each person alone: --min-user-events N"
        )
    if catalogue.mode == PUBLIC and titles is not None:
        raise DataError("titles cannot be given beside a catalogue; add them to it as a column title")


def first_notes(log: Log, catalogue: Catalogue, titles: object) -> list[str]:
    """The notes that can be made before events are counted."""
    notes = [] if catalogue.note is None else [catalogue.note]
    return notes if titles is not None else notes + title_notes(log, catalogue.mode)


def no_rows(log: Log) -> DataError:
    """The line about a log without events."""
    return DataError(f"{log.name}: has no rows; give a log with at least one event")


def nothing_left(log: Log, counts: dict[str, Any], options: Options) -> DataError:
    """The line about filters that remove all events."""
    if "removed" in counts and counts["removed"]["events"]:
        left, last = counts["removed"]["events"], f"--min-events {options.min_events} ({options.filter.value})"
    else:
        left, last = counts["emptied"]["events"], f"--min-user-events {options.min_user_events}"
    return DataError(f"{log.name}: no event is left of {left:,} after {last}; lower it")


def count_outside(
    log: Log, catalogue: Catalogue, before: int, after: int, counts: dict[str, Any], notes: list[str]
) -> None:
    """Events of items that are not in the catalogue; all of them outside is an error, most of them a warning."""
    outside = counts["outside_catalogue"] = before - after
    if not after:
        raise DataError(
            f"{log.name}: none of {before:,} events is of an item in the catalogue {catalogue.source}; see that both write "
            "ids in the same way, and that --item names the right column"
        )
    if 2 * outside > before:
        notes.append(
            f"WARNING: {outside:,} of {before:,} events, more than half, are of items that are not in the catalogue "
            f"{catalogue.source}, and are dropped: see that both write ids in the same way"
        )


def time_origin(unit: Unit, first: float, last: float) -> dict[str, Any]:
    """What the manifest says of the times."""
    return {"time": unit.name, "from": unit.text(first), "to": unit.text(last)}


def count_lengths(log: Log, lengths: np.ndarray, counts: dict[str, Any], notes: list[str]) -> None:
    """Who can be evaluated; nobody with two events means that there is no sequence at all. lengths: int [N]."""
    users, longest = len(lengths), int(lengths.max())
    if longest < 2 and any(counts.get(step) for step in ("removed", "emptied", "outside_catalogue")):
        raise DataError(
            f"{log.name}: nobody has two events left after the filter, so there are no sequences; lower --min-events and "
            "--min-user-events, or add items to the catalogue"
        )
    if longest < 2:
        raise DataError(
            f"{log.place(0)}, column {log.columns[USER]!r}: this user has one event, as all {users:,} have, so "
            "there are no sequences; is this the column of the user? (--user NAME)"
        )
    short, empty = int((lengths < SHORTEST_SPLIT).sum()), int((lengths == 0).sum())
    counts["evaluated_users"], counts["short_users"], counts["empty_users"] = users - short, short, empty
    if short:
        notes.append(
            f"{short:,} of {users:,} users have fewer than {SHORTEST_SPLIT} events: they stay in training and "
            "are left out of evaluation"
        )
    if empty:
        notes.append(f"{empty:,} of {users:,} users have no events left; they still count as users")


def make_manifest(
    log: Log,
    sha256: str | None,
    origin: dict[str, Any],
    catalogue: Catalogue,
    options: Options,
    counts: dict[str, Any],
    notes: list[str],
) -> dict[str, Any]:
    """Where the sequences come from and what was done."""
    source = {
        "name": log.name,
        "format": log.format,
        "files": len(log.files),
        "bytes": sum(file.stat().st_size for file in log.files),
        "sha256": sha256,
        "columns": {role: name for role, name in log.columns.items() if role in (USER, ITEM, TIME, TITLE)},
    }
    return {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "dpformer": __version__,
        "input": source | origin,
        "catalogue": catalogue.entry(counts["items"], counts.get("outside_catalogue", 0)),
        "options": options.entry(),
        "outside_guarantee": options.outside_guarantee(),
        "counts": counts,
        "notes": notes,
    }

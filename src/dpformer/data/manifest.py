"""Record what is done to a log: counts, notes for the user, and the manifest."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from dpformer import __version__
from dpformer.data.catalogue import PRIVATE, PUBLIC, Catalogue, open_catalogue, title_notes
from dpformer.data.options import Options
from dpformer.data.read import read_log
from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.data.read.ids import suspicious_users
from dpformer.data.read.log import Log
from dpformer.data.read.times import Unit
from dpformer.data.sequences import TimeSplit
from dpformer.data.split import places
from dpformer.errors import DataError

MANIFEST_FORMAT, MANIFEST_VERSION = "dpformer-sequences", 1


@dataclass
class Record:
    """A log that is being prepared, and what the manifest will say about it.

    counts: users, items and events as read, and what each step removed. notes: sentences for the user.
    times: unit and range of the times. cut: the date of a split by time, in that unit.
    """

    log: Log
    options: Options
    catalogue: Catalogue
    counts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    times: dict[str, Any] = field(default_factory=lambda: {"time": None})
    cut: int | None = None

    def set_times(self, unit: Unit, first: float, last: float) -> None:
        """Record the unit and the range of the times; a date that splits nothing is an error."""
        self.times = {"time": unit.name, "from": unit.text(first), "to": unit.text(last)}
        self.cut = self.options.cut(unit.per_second)
        if self.cut is not None and not first < self.cut <= last:
            raise DataError(
                f"{self.log.name}: all events are on one side of --date {self.options.date} (they are from {unit.text(first)} to "
                f"{unit.text(last)}, UTC); give a date between them"
            )

    def no_rows(self) -> DataError:
        """Return the error for a log without events."""
        if self.counts.get("where"):
            cure = "compare its values with those of the log, letter case included"
            return self.nothing_left(self.counts["where"], f"--where {self.options.where!r}", cure)
        return DataError(f"{self.log.name}: has no rows; give a log with at least one event")

    def count_dropped(self, missing: int, kept: int) -> None:
        """Count events that `where` and `drop_missing` dropped; to drop all of them is an error."""
        if where := self.log.dropped():
            self.counts["where"] = where
        if missing:
            self.counts["missing"] = missing
        if not kept:
            cure = "check the columns that --user, --item and --time name"
            raise self.nothing_left(missing, "--drop-missing", cure) if missing else self.no_rows()

    def nothing_left(self, before: int, option: str, cure: str = "lower it") -> DataError:
        """Return the error for a filter that removes all `before` events."""
        return DataError(f"{self.log.name}: no event is left of {before:,} after {option}; {cure}")

    def count_outside(self, before: int, after: int) -> None:
        """Count events of items outside the catalogue: all of them is an error, most of them a warning."""
        outside = self.counts["outside_catalogue"] = before - after
        if not after:
            raise DataError(
                f"{self.log.name}: none of {before:,} events has an item of the catalogue {self.catalogue.source}; write ids "
                "in the same way in both, and check --item"
            )
        if 2 * outside > before:
            self.notes.append(
                f"WARNING: {outside:,} of {before:,} events, more than half, have items outside the catalogue "
                f"{self.catalogue.source} and are dropped; check that both write ids in the same way"
            )

    def count_lengths(self, ids: pl.Series, lengths: np.ndarray, split: TimeSplit | None) -> None:
        """Count users to evaluate, and name suspicious ones. Fails if no user has two events. ids: [N]; lengths: int [N]."""
        self.notes += suspicious_users(ids, lengths)
        users, longest = len(lengths), int(lengths.max())
        if self.options.single_events:
            return
        if longest < 2 and any(self.counts.get(step) for step in ("removed", "emptied", "outside_catalogue")):
            raise DataError(
                f"{self.log.name}: no user has two events left after the filter; lower --min-events or --min-user-events, or "
                "add items to the catalogue"
            )
        if longest < 2:
            wrong = f"each of {users:,} users has only one event, so there are no sequences"
            raise self.log.error(0, USER, wrong, "name the column of the user with --user NAME")
        _, evaluated, _, left_out = places(lengths, split, "test")
        short, empty = int((~evaluated).sum()), int((lengths == 0).sum())
        self.counts |= {"evaluated_users": users - short, "short_users": short, "empty_users": empty}
        if short:
            self.notes.append(
                f"{short:,} of {users:,} users are left out of evaluation ({left_out}); they stay in training"
            )
        if empty:
            self.notes.append(f"{empty:,} of {users:,} users have no events left; they still count as users")

    def outside_guarantee(self) -> list[str]:
        """List, in sentences, what the guarantee for one user does not cover: filters, and titles of the log."""
        least, titles, outside = self.options.min_events, self.log.columns.get(TITLE), []
        if least > 1:
            outside.append(
                f"items and users were filtered by --min-events {least}, which counts over people: one person's events decide "
                "whether events of other people stay"
            )
        if titles is not None:
            outside.append(
                f"titles are the most frequent text among people (--title {titles}): one person's events may decide the title of "
                "an item. Titles of a public file (--catalogue FILE) are covered"
            )
        return outside

    def manifest(self, sizes: Mapping[str, int], sha256: str | None) -> dict[str, Any]:
        """Return the manifest. sizes: users, items and events; sha256: hash of the log."""
        log, options = self.log, self.options
        size = sum(file.stat().st_size for file in log.files)
        source = {
            **{"name": log.name, "format": log.format, "files": len(log.files), "bytes": size, "sha256": sha256},
            "columns": {role: name for role, name in log.columns.items() if role in (USER, ITEM, TIME, TITLE)},
        }
        return {
            "format": MANIFEST_FORMAT,
            "version": MANIFEST_VERSION,
            "dpformer": __version__,
            "input": source | self.times,
            "catalogue": self.catalogue.entry(sizes["items"], self.counts.get("outside_catalogue", 0)),
            "options": {
                **{name: getattr(options, name) for name in ("min_events", "min_user_events", "dedupe")},
                "filter": options.filter if options.min_events > 1 else None,
                **({"split": options.split, "date": options.date} if options.date else {}),
                **({"features": options.features} if options.features else {}),
            },
            "reading": options.reading(log.columns),
            "outside_guarantee": self.outside_guarantee(),
            "counts": {**sizes, **self.counts},
            "notes": self.notes,
        }


def open_log(source: Any, options: Options) -> Record:
    """Open the log and its catalogue, refuse options that contradict the catalogue, and start the record."""
    catalogue = open_catalogue(options)
    if catalogue.mode == PRIVATE and options.min_events > 1:
        raise DataError(
            f"--min-events {options.min_events} cannot be used with --catalogue private, because it counts over people; "
            "leave it out (fit drops rare items by noisy counts), or use --min-user-events N"
        )
    # With a public catalogue, `title` names a column of it.
    log = read_log(source, options.wanted(titles=catalogue.mode != PUBLIC))
    named = options.user and options.item and (options.time or options.no_time)
    if options.drop_missing and log.named_by_rows and not (named or options.single_events):
        raise DataError(
            f"{log.name}: people's rows say which columns there are ({log.format}), so with --drop-missing one person's odd row "
            "could remove the events of all others; name the columns: --user NAME --item NAME, and --time NAME or --no-time"
        )
    if options.date is not None and TIME not in log.columns:
        raise DataError(f"{log.name}: has no times, which --split time needs; name the column with --time NAME")
    log = replace(log, nulls=options.nulls, time_format=options.time_format, fold_users=options.fold_users)
    return Record(log, options, catalogue, notes=[*catalogue.notes, *title_notes(log, catalogue.mode)])

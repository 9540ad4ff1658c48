"""What `prepare` is asked to do with a log."""

from dataclasses import dataclass
from typing import Any

from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.errors import DataError

SINGLE_PASS, ITERATIVE = "single-pass", "iterative"


@dataclass(frozen=True)
class Options:
    """The options of `prepare`.

    catalogue: the public items, one a row (a path or a frame); "log": those of the log, assumed public; "private": those of
        the log, of which `fit` selects some by noisy counts. A `Path` is always a file, also one called log or private.
    user, item, time: column names that the usual aliases do not find.
    title: the column of titles, of the catalogue's file if there is one, else of the log: an item gets the title that most
        of its people have.
    min_events: the least events of a user and of an item. This counts over people, so the manifest says that it is outside
        of the guarantee.
    filter: how `min_events` counts. "single-pass": once, on the log as it is; an event stays if both its user and its item
        reach the minimum there (Kang & McAuley, 2018: the paper's data), and afterwards some have fewer. "iterative": again
        until every user and item that is left has the minimum (the k-core).
    min_user_events: a person with fewer events keeps the place among the people, without events.
    dedupe: keep only the first of events that agree in user, item and time.
    """

    catalogue: Any = "log"
    user: str | None = None
    item: str | None = None
    time: str | None = None
    title: str | None = None
    min_events: int = 0
    filter: str = SINGLE_PASS
    min_user_events: int = 0
    dedupe: bool = False

    def __post_init__(self) -> None:
        for option, value in (("--min-events", self.min_events), ("--min-user-events", self.min_user_events)):
            if value < 0:
                raise DataError(f"{option} {value} is negative; give 0 (keep all) or more")
        if self.filter not in (SINGLE_PASS, ITERATIVE):
            raise DataError(f"--filter {self.filter!r} is unknown; give {SINGLE_PASS} or {ITERATIVE}")

    def columns(self) -> dict[str, str]:
        """Role to name, for the columns of the log that are asked for by name."""
        names = {USER: self.user, ITEM: self.item, TIME: self.time, TITLE: self.title}
        return {role: name for role, name in names.items() if name is not None}

    def entry(self) -> dict[str, Any]:
        """What the manifest says of them."""
        return {
            "min_events": self.min_events,
            "filter": self.filter if self.min_events > 1 else None,
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

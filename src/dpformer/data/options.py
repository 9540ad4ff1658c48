"""The options of `prepare`."""

from dataclasses import dataclass
from typing import Any

from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.errors import DataError

SINGLE_PASS, ITERATIVE = "single-pass", "iterative"


@dataclass(frozen=True)
class Options:
    """What `prepare` reads from a log, and which events it keeps.

    Args:
        catalogue: a file or frame of public items, one per row; "log": the items of the log, assumed public; "private": the
            items of the log, of which `fit` selects some by noisy counts. A `Path` always means a file.
        user: name of the column, if automatic detection does not find it.
        item: the same.
        time: the same.
        title: the column of titles, in the catalogue if it is a file, else in the log. In a log the title that most of an
            item's users have is used, which is outside the guarantee. Titles are published with a model.
        min_events: smallest number of events per user and per item. This filter counts over users, so it is outside the
            guarantee, and the manifest says so.
        filter: "single-pass" counts once, on the unfiltered log (Kang & McAuley, 2018), so some users and items end with
            fewer. "iterative" repeats until all users and items have the minimum (the k-core).
        min_user_events: users with fewer events stay as users without events.
        dedupe: keep only the first of the events that agree in user, item and time.

    Raises:
        DataError: a number is negative, or the filter is unknown.
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
        """Map roles to names, for the log's columns that are requested by name."""
        names = {USER: self.user, ITEM: self.item, TIME: self.time, TITLE: self.title}
        return {role: name for role, name in names.items() if name is not None}

    def entry(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {
            "min_events": self.min_events,
            "filter": self.filter if self.min_events > 1 else None,
            "min_user_events": self.min_user_events,
            "dedupe": self.dedupe,
        }

    def outside_guarantee(self) -> list[str]:
        """List, in sentences, the filters that the guarantee for one user does not cover."""
        if self.min_events <= 1:
            return []
        filtered = f"items and users were filtered by --min-events {self.min_events}, which counts over people"
        return [f"{filtered}: one person's events decide whether events of other people stay"]

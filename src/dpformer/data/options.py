"""The options of `prepare`, and those with which a further log is read in the same way."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from dpformer.data.read.columns import ITEM, TIME, TITLE, USER, Wanted
from dpformer.data.read.ids import NULLS
from dpformer.errors import DataError

SINGLE_PASS, ITERATIVE = "single-pass", "iterative"
LEAVE_ONE_OUT, BY_TIME = "leave-one-out", "time"
# The options that say how a log is read, and their types; a further log is read with the same ones.
READING = {
    **{"user": str, "item": str, "time": str, "no_time": bool, "time_format": str},
    **{"null_values": list, "drop_missing": bool, "fold_users": bool, "where": str, "dedupe": bool},
}
# The others that a further log is prepared with.
PREPARING = {"min_events": int, "filter": str, "min_user_events": int, "title": str, "features": str}


@dataclass(frozen=True)
class Options:
    """What `prepare` reads from a log, and which events it keeps.

    Args:
        catalogue: a file or frame of public items, one per row; "log": the items of the log, assumed public; "private": the
            items of the log, of which `fit` selects some by noisy counts. A `Path` always means a file.
        user: name of the column, if automatic detection does not find it.
        item: the same.
        time: the same.
        no_time: use no times; the order of the file is the order of time.
        time_format: how times are written, as a strftime pattern such as "%d/%m/%Y %H:%M".
        null_values: spellings of missing values, compared without case, instead of NULL, nan, None, N/A, NA, nil, undefined.
            Blank values are always missing.
        drop_missing: drop events without user, item or time; else they are an error.
        fold_users: ignore letter case and surrounding blanks of user ids, which are then written in lower case.
        where: a condition on events in SQL, such as "qty > 0 and shop = 'north'"; it looks at each row alone.
        title: the column of titles, in the catalogue if it is a file, else in the log. In a log the title that most of an
            item's users have is used, which is outside the guarantee. Titles are published with a model.
        features: columns of a public catalogue by which rare and new items are scored, as "category,price:10": numbers of
            `price` in 10 bins.
        min_events: smallest number of events per user and per item. This filter counts over users, so it is outside the
            guarantee, and the manifest says so.
        filter: "single-pass" counts once, on the unfiltered log (Kang & McAuley, 2018), so some users and items end with
            fewer. "iterative" repeats until all users and items have the minimum (the k-core).
        min_user_events: users with fewer events stay as users without events.
        dedupe: keep only the first of the events that agree in user, item and time.
        split: what training does not see: "leave-one-out", each user's last items; "time", events from `date` on.
        date: for a split by time, such as "2025-02-01" or "2025-02-01 12:00" (UTC). It must not depend on the log.
        hints: role to the name of a column in an earlier log, which is used where this log has it.
        single_events: each user may have one event only, as in a log of histories to recommend for.

    Raises:
        DataError: a number is negative, the filter is unknown, or options contradict each other.
    """

    catalogue: Any = "log"
    user: str | None = None
    item: str | None = None
    time: str | None = None
    no_time: bool = False
    time_format: str | None = None
    null_values: tuple[str, ...] | None = None
    drop_missing: bool = False
    fold_users: bool = False
    where: str | None = None
    title: str | None = None
    features: str | None = None
    min_events: int = 0
    filter: str = SINGLE_PASS
    min_user_events: int = 0
    dedupe: bool = False
    split: str = LEAVE_ONE_OUT
    date: str | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    single_events: bool = False

    def __post_init__(self) -> None:
        if self.no_time and self.time is not None:
            raise DataError(f"--time {self.time} and --no-time contradict each other; give one of them")
        if self.features is not None and not isinstance(self.features, str):
            object.__setattr__(self, "features", ",".join(self.features))
        if isinstance(self.null_values, str):
            raise DataError("null_values must be a list of texts, such as ['NULL', '-1']")
        for option, value in (("--min-events", self.min_events), ("--min-user-events", self.min_user_events)):
            if value < 0:
                raise DataError(f"{option} {value} is negative; give 0 (keep all) or more")
        if self.filter not in (SINGLE_PASS, ITERATIVE):
            raise DataError(f"--filter {self.filter!r} is unknown; give {SINGLE_PASS} or {ITERATIVE}")
        if self.split not in (LEAVE_ONE_OUT, BY_TIME):
            raise DataError(f"--split {self.split!r} is unknown; give {LEAVE_ONE_OUT} or {BY_TIME}")
        if (self.split == BY_TIME) != (self.date is not None):
            raise DataError("--split time and --date go together: give --split time --date 2025-02-01")
        if self.split == BY_TIME and self.no_time:
            raise DataError("--split time needs times; leave out --no-time")
        if self.date is not None:
            object.__setattr__(self, "date", utc_date(self.date))

    def cut(self, per_second: int) -> int | None:
        """The date of a split by time, as a time with so many units per second."""
        return None if self.date is None else int(datetime.fromisoformat(f"{self.date}+00:00").timestamp()) * per_second

    @property
    def nulls(self) -> tuple[str, ...]:
        """Spellings of missing values, in lower case."""
        return NULLS if self.null_values is None else tuple(text.strip().lower() for text in self.null_values)

    def wanted(self, titles: bool) -> Wanted:
        """The columns to find in the log. titles: whether `title` names a column of the log."""
        names = {USER: self.user, ITEM: self.item, TIME: self.time, TITLE: self.title if titles else None}
        asked = {role: name for role, name in names.items() if name is not None}
        hints = {role: name for role, name in self.hints.items() if not (self.no_time and role == TIME)}
        return Wanted(asked, hints=hints, where=self.where, no_time=self.no_time)

    def reading(self, columns: Mapping[str, str]) -> dict[str, Any]:
        """How the log was read, for `like`. columns: role to name of the columns in use."""
        given = {name: getattr(self, name) for name in READING}
        default = {one.name: one.default for one in fields(self)}
        options = {name: value for name, value in given.items() if value != default[name]}
        if self.null_values is not None:
            options["null_values"] = list(self.null_values)
        return {"columns": {role: columns[role] for role in (USER, ITEM, TIME) if role in columns}, "options": options}


def utc_date(text: str) -> str:
    """A date or time in UTC, to the second.

    >>> utc_date("2025-02-01"), utc_date("2025-02-01T01:30+01:00")
    ('2025-02-01 00:00:00', '2025-02-01 00:30:00')
    """
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise DataError(f"--date {text!r} is not a date; write it as 2025-02-01 or 2025-02-01 12:00") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def like(log: Mapping[str, Any], whole: bool = False, **given: Any) -> dict[str, Any]:
    """Options to read a further log as an earlier one was read. log: of its `Dataset`; `given` options replace those.

    whole: with the filters and titles too, to prepare it.

    Raises:
        DataError: `log` is not what a `Dataset` has.
    """
    columns, options = log.get("columns", {}), log.get("options", {})
    allowed, options = READING, dict(options) if isinstance(options, dict) else {"damaged": True}
    if whole:
        allowed, options = READING | PREPARING, options | log.get("preparing", {})
    sound = isinstance(columns, dict) and set(options) <= set(allowed)
    sound = sound and all(isinstance(value, allowed[name]) for name, value in options.items())
    if not sound or not all(
        isinstance(name, str) for name in (*columns, *columns.values(), *options.get("null_values", ()))
    ):
        raise DataError("how the log was read is recorded in a damaged form; copy the folder again, or prepare again")
    drop = {"time"} if given.get("no_time") else {"no_time"} if given.get("time") else set()
    return {"hints": columns} | {name: value for name, value in options.items() if name not in drop} | given


def prepare_command(manifest: Mapping[str, Any]) -> str:
    """What to type to prepare such data. Names of files are not in it."""
    if "dataset" in manifest:
        return f"dpformer prepare {shlex.quote(manifest['dataset']['name'])} -o DATA"
    options = dict(manifest.get("reading", {}).get("options", {}))
    if "null_values" in options:
        options["null_values"] = ",".join(options["null_values"])
    mode = manifest.get("catalogue", {}).get("mode", "log")
    options |= {"catalogue": "FILE"} if mode == "public" else {"catalogue": mode} if mode == "private" else {}
    columns = manifest.get("input", {}).get("columns", {})
    options |= {"title": columns[TITLE]} if TITLE in columns else {}
    options |= {name: value for name, value in manifest.get("options", {}).items() if value and name != "dedupe"}
    typed = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in options.items()
    ]
    return " ".join(["dpformer prepare LOG", *typed, "-o DATA"])

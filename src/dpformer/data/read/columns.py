"""Column roles, and the names that are recognised for each role."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from dpformer.errors import DataError
from dpformer.where import columns_of

USER, ITEM, TIME, RATING, TITLE = "user_id", "item_id", "timestamp", "rating", "title"
# Column names that catalogues and lists of recommendations use themselves.
_RESERVED = ("item", USER, ITEM, TITLE)

# Compared without case and punctuation (`userId`, `user_id` and `User ID` are one name); the first match wins.
# A session id is not a user: one person has many sessions, and the guarantee is per person.
ALIASES: Mapping[str, tuple[str, ...]] = {
    USER: (
        *("userid", "user", "uid", "reviewerid", "customerid", "customer", "memberid", "member", "accountid"),
        *("visitorid", "profileid", "clientid", "buyerid"),
    ),
    ITEM: (
        *("itemid", "item", "iid", "movieid", "asin", "parentasin", "productid", "product", "articleid", "sku"),
        *("bookid", "isbn", "trackid", "songid", "videoid", "gameid", "businessid", "newsid", "contentid"),
    ),
    TIME: (
        *("timestamp", "time", "ts", "unixreviewtime", "unixtimestamp", "datetime", "eventtime", "createdat"),
        *("date", "timestampms", "reviewtime", "t"),
    ),
    RATING: ("rating", "overall", "score", "stars"),
    TITLE: ("title", "itemtitle", "movietitle", "producttitle", "itemname", "productname"),
}
OPTIONS = {USER: "--user", ITEM: "--item", TIME: "--time", TITLE: "--title"}


@dataclass(frozen=True)
class Wanted:
    """The columns to find in a table.

    asked: role to the name of a column that must exist. items: whether the table is a catalogue, whose further columns are read
    too, under their own names. hints: role to a name that is preferred over aliases where the table has it. where: a condition on
    rows. no_time: no column is the time.
    """

    asked: Mapping[str, str]
    items: bool = False
    hints: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    no_time: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """Roles that the table must have."""
        return (ITEM,) if self.items else (USER, ITEM)

    def named(self, role: str, cells: Sequence[str]) -> bool:
        """Whether one of the cells is a name for this role."""
        given = {cell.strip() for cell in cells}
        named = {self.asked.get(role), self.hints.get(role)} & given
        return bool(named) or not {_plain(cell) for cell in cells}.isdisjoint(ALIASES[role])

    def used(self, columns: Mapping[str, str]) -> dict[str, str]:
        """Select the roles to read from `columns` (role to name); a log's title only if requested."""
        titled = self.items or TITLE in self.asked
        roles = (*self.required, TIME, TITLE) if titled else (*self.required, TIME)
        return {role: columns[role] for role in roles if role in columns}

    def needed(self, columns: Mapping[str, str], names: Sequence[str]) -> list[str]:
        """The columns of a log to read: those in use and of the condition; all, if it names others, for the error."""
        own, meant = list(self.used(columns).values()), [] if self.where is None else columns_of(self.where)
        return list(dict.fromkeys(own + meant)) if set(meant) <= set(names) else list(names)

    def select(self, frame: pl.LazyFrame, columns: Mapping[str, str]) -> pl.LazyFrame:
        """Read the columns, renamed to their roles; without columns that have no name (pandas' index)."""
        used = self.used(columns)
        further = [pl.exclude(*used.values(), "")] if self.items else []
        return frame.select(*(pl.col(name).alias(role) for role, name in used.items()), *further)


def find_columns(names: Sequence[str], wanted: Wanted, where: str) -> dict[str, str]:
    """Map roles to column names; `where` starts error messages."""
    columns = dict(wanted.asked)
    for role, name in columns.items():
        if name not in names:
            raise DataError(f"{where}: no column {name!r} for {OPTIONS[role]}; the columns are {_listed(names)}")
    columns = {role: name for role, name in wanted.hints.items() if name in names} | columns
    if len(set(columns.values())) < len(columns):
        twice = _listed(list(columns.values()))
        raise DataError(f"{where}: a column is asked for twice ({twice}); name different ones")
    plain = {_plain(name): name for name in reversed(names) if name not in columns.values()}  # the first of equal names
    for role in (ITEM, TITLE) if wanted.items else [r for r in ALIASES if not (wanted.no_time and r == TIME)]:
        match = next((plain[alias] for alias in ALIASES[role] if alias in plain), None)
        if match is not None:
            columns.setdefault(role, match)
    for role in wanted.required:
        if role not in columns:
            cure = "call it item_id" if wanted.items else f"name it with {OPTIONS[role]} NAME"
            what = role.removesuffix("_id")
            raise DataError(f"{where}: no column is recognised as the {what} among {_listed(names)}; {cure}")
    taken = [name for name in names if name in _RESERVED and name not in columns.values()]
    if wanted.items and taken:
        raise DataError(f"{where}: column {taken[0]!r} cannot be kept, the name is in use; rename or drop that column")
    return {role: columns[role] for role in ALIASES if role in columns}


def is_alias(role: str, name: str) -> bool:
    """Whether a column's name is one of those for a role."""
    return _plain(name) in ALIASES[role]


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")

"""The columns of a log: their names here, and the names that other people give them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from dpformer.errors import DataError

USER, ITEM, TIME, RATING, TITLE = "user_id", "item_id", "timestamp", "rating", "title"
# Names that a catalogue, or a list of recommendations from it, gives to columns of its own.
_RESERVED = ("item", USER, ITEM, TITLE)

# Compared without case and punctuation (`userId`, `user_id` and `User ID` are one name); earlier ones win.
# A session id is deliberately no user: one person has many sessions, and the guarantee is per person.
ALIASES: Mapping[str, tuple[str, ...]] = {
    USER: ("userid", "user", "uid", "reviewerid", "customerid", "memberid", "accountid", "visitorid", "profileid"),
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
    """The columns to look for in a table: by default those of a log.

    asked: role to the name of a column that must be there. hints: role to a name that goes before the aliases where the
    table has it. required: roles without which the table is of no use. known: roles that are looked for by aliases.
    read: roles whose columns are read. further: whether all other columns are read too, under their own names.
    frame: how messages call a frame in memory.
    """

    asked: Mapping[str, str]
    hints: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = (USER, ITEM)
    known: tuple[str, ...] = tuple(ALIASES)
    read: tuple[str, ...] = (USER, ITEM, TIME)
    further: bool = False
    frame: str = "frame"

    def named(self, role: str, cells: Sequence[str]) -> bool:
        """Whether one of the cells is a name for this role."""
        given = {cell.strip() for cell in cells}
        plain = {_plain(cell) for cell in cells}
        return self.asked.get(role) in given or self.hints.get(role) in given or bool(plain & set(ALIASES[role]))

    def used(self, columns: Mapping[str, str]) -> dict[str, str]:
        """Those of `columns` (role to name) that are read under the name of their role."""
        return {role: columns[role] for role in self.read if role in columns}

    def select(self, frame: pl.LazyFrame, columns: Mapping[str, str]) -> pl.LazyFrame:
        """The columns that are read. A column without a name (the index that pandas writes) is not one of them."""
        used = self.used(columns)
        further = [pl.exclude(*used.values(), "")] if self.further else []
        return frame.select(*(pl.col(name).alias(role) for role, name in used.items()), *further)


def log_columns(asked: Mapping[str, str]) -> Wanted:
    """The columns of a log, some of them by name. A title is read only if it is asked for."""
    return Wanted(asked, read=(USER, ITEM, TIME, TITLE) if TITLE in asked else (USER, ITEM, TIME))


def item_columns(item: str | None, title: str | None) -> Wanted:
    """The columns of a file of items. item: the name that the log has for the item's id."""
    return Wanted(
        asked={} if title is None else {TITLE: title},
        hints={} if item is None else {ITEM: item},
        required=(ITEM,),
        known=(ITEM, TITLE),
        read=(ITEM, TITLE),
        further=True,
        frame="catalogue frame",
    )


def find_columns(names: Sequence[str], wanted: Wanted, where: str) -> dict[str, str]:
    """Role to name, for the roles that the columns `names` play; `where` begins the message of an error."""
    found: dict[str, str] = {}
    for role, name in wanted.asked.items():
        if name not in names:
            raise DataError(f"{where}: no column {name!r} for {OPTIONS[role]}; the columns are {_listed(names)}")
        found[role] = name
    found |= {role: name for role, name in wanted.hints.items() if name in names}
    if len(set(found.values())) < len(found):
        raise DataError(f"{where}: a column is asked for twice ({_listed(list(found.values()))}); name different ones")
    plain: dict[str, str] = {}
    for name in names:
        if name not in found.values():
            plain.setdefault(_plain(name), name)
    for role in wanted.known:
        hit = next((plain[alias] for alias in ALIASES[role] if alias in plain), None)
        if role not in found and hit is not None:
            found[role] = hit
    _check_found(names, found, wanted, where)
    return {role: found[role] for role in ALIASES if role in found}


def _check_found(names: Sequence[str], found: Mapping[str, str], wanted: Wanted, where: str) -> None:
    for role in wanted.required:
        if role not in found:
            cure = "call it item_id" if wanted.further else f"say which with {OPTIONS[role]} NAME"
            raise DataError(
                f"{where}: no column is known as the {role.removesuffix('_id')}; the columns are {_listed(names)}: {cure}"
            )
    taken = [name for name in names if name in _RESERVED and name not in found.values()]
    if wanted.further and taken:
        raise DataError(f"{where}: column {taken[0]!r} cannot be kept, the name is in use; rename or drop that column")


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")

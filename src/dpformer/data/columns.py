"""The columns of a log: their names here, and the names that other people give them."""

import re
from collections.abc import Mapping, Sequence

from dpformer.errors import DataError

USER, ITEM, TIME, RATING, TITLE = "user_id", "item_id", "timestamp", "rating", "title"

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
OPTIONS = {USER: "--user", ITEM: "--item", TIME: "--time"}


def find_columns(names: Sequence[str], asked: Mapping[str, str], where: str) -> dict[str, str]:
    """Which column of `names` plays which role; `asked` (role to name) overrules the aliases.

    User and item must be found; time, rating and title are there or not.
    """
    found: dict[str, str] = {}
    for role, name in asked.items():
        if name not in names:
            raise DataError(f"{where}: no column {name!r} for {OPTIONS[role]}; the columns are {_listed(names)}")
        found[role] = name
    if len(set(found.values())) < len(found):
        raise DataError(f"{where}: a column is asked for twice ({_listed(list(found.values()))}); name different ones")
    plain: dict[str, str] = {}
    for name in names:
        if name not in found.values():
            plain.setdefault(re.sub(r"[\W_]", "", name.lower()), name)
    for role, aliases in ALIASES.items():
        hit = next((plain[alias] for alias in aliases if alias in plain), None)
        if role not in found and hit is not None:
            found[role] = hit
    for role in (USER, ITEM):
        if role not in found:
            raise DataError(
                f"{where}: no column is known as the {role.removesuffix('_id')}; the columns are {_listed(names)}: "
                f"say which with {OPTIONS[role]} NAME"
            )
    return {role: found[role] for role in ALIASES if role in found}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")

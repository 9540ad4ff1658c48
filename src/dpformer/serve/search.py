"""Finding items by what people type: words in any order, in any case, with or without accents."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import polars as pl


def fold(text: str) -> str:
    """Lower case without accents.

    >>> fold("Amélie ÉTÉ")
    'amelie ete'
    """
    plain = unicodedata.normalize("NFKD", text)
    return "".join(c for c in plain if not unicodedata.combining(c)).casefold()


class ItemSearch:
    """Looks through ids and titles, `[items]` each (a title may be None). Places count from 0."""

    def __init__(self, ids: Sequence[str], titles: Sequence[str | None]) -> None:
        self._ids = pl.Series([fold(i) for i in ids], dtype=pl.String)
        self._titles = pl.Series([fold(t or "") for t in titles], dtype=pl.String)
        self._both = self._titles + "\n" + self._ids

    def find(self, text: str, limit: int) -> tuple[list[int], bool]:
        """Places of the items that hold every word, and whether there are more than `limit`.

        First the item whose id or title is the text, then those that begin with it, then those with a word that does, then the
        rest; otherwise in the order of the catalogue.
        """
        whole = fold(text).strip()
        if not whole:
            return list(range(min(limit, len(self._ids)))), len(self._ids) > limit
        places = pl.Series(range(len(self._both)), dtype=pl.UInt32)
        for word in whole.split():
            places = places.filter(self._both.gather(places).str.contains(word, literal=True))
        ids, titles = self._ids.gather(places), self._titles.gather(places)
        order = pl.DataFrame(
            {
                "place": places,
                "same": (ids == whole) | (titles == whole),
                "begins": ids.str.starts_with(whole) | titles.str.starts_with(whole),
                "word": titles.str.contains(" " + whole, literal=True),
            }
        ).sort("same", "begins", "word", descending=True, maintain_order=True)
        return order["place"].head(limit).to_list(), len(places) > limit

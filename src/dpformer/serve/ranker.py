"""Histories to ranked items: what is allowed, what is left out, many at once in one forward pass; and items by words."""

from __future__ import annotations

import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dpformer.artifact import Artifact, load
from dpformer.artifact.layout import MODEL
from dpformer.errors import DPFormerError
from dpformer.files import sha256
from dpformer.models.top import Best

_FILTERS = 16


@dataclass(frozen=True)
class Query:
    """One history of item numbers, how many items are wanted, which are left out, and what ranks them: the filters."""

    history: list[int]
    k: int
    left_out: list[int]
    best: Best


class Ranker:
    """A released model that answers many queries at once, of at most `k` items each.

    name, sha256: of its run folder and of its weights.
    """

    def __init__(self, artifact: Artifact, name: str = "", sha256: str = "", k: int = 100) -> None:
        self.artifact, self.name, self.sha256, self.k = artifact, name, sha256, k
        catalogue = artifact.catalogue
        self.ids = catalogue["item_id"].cast(pl.String).to_list()
        has_titles = "title" in catalogue.columns
        self.titles: list[str | None] = (
            catalogue["title"].cast(pl.String).to_list() if has_titles else [None] * len(catalogue)
        )
        self.columns = [name for name in catalogue.columns if name != "item"]
        self._filters: OrderedDict[str, Best] = OrderedDict()
        self._lock = threading.Lock()
        everything = self.best(None, None)[0]
        self.answer([Query([], 1, [], everything), Query([1], 1, [], everything)])  # the first pass is a slow one

    def best(self, only: Sequence[str] | None, where: str | None) -> tuple[Best, list[str]]:
        """What ranks the items that pass these filters, and what of `only` is not in the catalogue."""
        unknown = [] if only is None else self.artifact.encode(only)[1]
        key = repr((None if only is None else sorted(only), where))
        with self._lock:
            if key not in self._filters:
                self._filters[key] = self.artifact.best(self.k, self.artifact.allowed(only, (), where)[0])
            self._filters.move_to_end(key)
            if len(self._filters) > _FILTERS:
                self._filters.popitem(last=False)
            return self._filters[key], unknown

    def answer(self, queries: Sequence[Query]) -> list[list[tuple[int, float]]]:
        """Item numbers and scores for each query, best first; fewer than k where fewer are left."""
        answers: list[list[tuple[int, float]]] = [[] for _ in queries]
        for best in {id(query.best): query.best for query in queries}.values():
            places = [place for place, query in enumerate(queries) if query.best is best]
            asked = [queries[place] for place in places]
            ranked = best.rank(self.artifact.read([q.history for q in asked]), [q.left_out for q in asked])
            for place, query, items, values in zip(places, asked, *(part.tolist() for part in ranked), strict=True):
                pairs = zip(items[: query.k], values[: query.k], strict=True)
                answers[place] = [(item, value) for item, value in pairs if item]
        return answers


def load_for_serving(run: Path, not_private: bool = False, k: int = 100) -> Ranker:
    """The ranker of a run folder; refuses what should not be put before people."""
    artifact = load(run)
    statement = artifact.statement
    if not statement.private and not not_private:
        raise DPFormerError(
            f"{run}: was trained without privacy (epsilon inf), so people's data may be read from its answers; "
            "serve a private run, or say --not-private if that is meant"
        )
    if statement.insecure and not not_private:
        raise DPFormerError(
            f"{run}: its guarantee does not hold ({'; '.join(statement.insecure)}); serve another run, or say --not-private "
            "if that is meant"
        )
    return Ranker(artifact, run.resolve().name, sha256(run / MODEL), k)


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

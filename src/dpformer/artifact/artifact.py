"""A released model in use: ranked items for histories. It needs the run folder only, never the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dpformer.errors import DPFormerError
from dpformer.models import Recommender
from dpformer.models.recommender import Scores
from dpformer.models.top import Best, Numbers, top
from dpformer.privacy import PrivacyStatement
from dpformer.where import rows_where


@dataclass(frozen=True)
class Artifact:
    """A model, its catalogue and its privacy statement. config: the content of config.json, for people."""

    model: Recommender
    catalogue: pl.DataFrame
    statement: PrivacyStatement
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that the model was made with, as they stand in config.json."""
        return dict(self.config.get("recipe", {}))

    @property
    def log(self) -> dict[str, Any]:
        """How the log was read that the model was fitted on, as it stands in config.json; for `dpformer.data.like`."""
        log = self.config.get("log")
        return log if isinstance(log, dict) else {}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Item ids and titles, as text, to numbers 1..M; an id goes before a title."""
        numbers: dict[str, int] = {}
        for column in ("title", "item_id"):
            if column in self.catalogue.columns:
                texts = self.catalogue[column].cast(pl.String).to_list()
                numbers |= {text: k for k, text in enumerate(texts, 1) if text is not None}
        return numbers

    @property
    def cold_start(self) -> str:
        """How histories without an item of the catalogue are ranked."""
        return "the order of the catalogue" if self.model.popularity() is None else "the released popularity"

    def encode(self, history: Iterable[Any]) -> tuple[list[int], list[str]]:
        """Item numbers of a history of ids or titles, and what is not in the catalogue."""
        if isinstance(history, str | bytes) or not isinstance(history, Iterable):
            raise DPFormerError(f"a history is a list of items, not {history!r}; give a list of lists: [[{history!r}]]")
        numbers, unknown = [], []
        for item in history:
            number = self._numbers.get(str(item))
            if number is None:
                unknown.append(str(item))
            else:
                numbers.append(number)
        return numbers, unknown

    def split(self, history: str) -> list[str]:
        """Items of a text: parts between commas, joined again where only the joined text is in the catalogue."""
        parts, items = history.split(","), []
        while parts:
            for n in range(len(parts), 0, -1):
                text = ",".join(parts[:n]).strip()
                if n == 1 or self.encode([text])[0]:
                    items.append(text)
                    parts = parts[n:]
                    break
        return [item for item in items if item]

    @property
    def item_count(self) -> int:
        """The number of items of the catalogue."""
        return self.model.item_count

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        """As in `Recommender`."""
        return self.model.candidates(best, allowed)

    def scorer(self, items: Tensor) -> Scores:
        """As in `Recommender`."""
        return self.model.scorer(items)

    def allowed(
        self, only: Sequence[Any] | None = None, exclude: Sequence[Any] = (), where: str | None = None
    ) -> tuple[Tensor | None, list[str]]:
        """Which items pass the filters, bool `[items + 1]`, None for all; and the names that are not in the catalogue.

        Args:
            only: ids or titles, of which alone to recommend; None for all items.
            exclude: ids or titles not to recommend.
            where: an SQL condition on the columns of the catalogue, such as "category = 'Drama' and in_stock".
        """
        if only is None and not exclude and where is None:
            return None, []
        for name, items in (("only", only), ("exclude", exclude)):
            if isinstance(items, str | bytes):
                raise DPFormerError(f"{name} is a list of items, not {items!r}; give {name}=[{items!r}]")
        chosen, unknown = (None, []) if only is None else self.encode(only)
        taken, unknown_too = self.encode(exclude)
        allowed = torch.full((len(self.catalogue) + 1,), chosen is None)
        allowed[chosen or []] = True
        allowed[[0, *taken]] = False
        if where is not None:
            allowed[1:] &= torch.from_numpy(rows_where(where, self.catalogue.drop("item"), "where").to_numpy().copy())
        return allowed, unknown + unknown_too

    def best(self, k: int, allowed: Tensor | None = None) -> Best:
        """Ranks histories of numbers, many at once; see `rank`."""
        if k < 1:
            raise DPFormerError(f"k = {k} is not at least 1")
        return Best(self.model, k, allowed)

    def rank(
        self,
        histories: Numbers,
        k: int,
        seen: bool = False,
        allowed: Tensor | None = None,
        left_out: Numbers | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best k items of each history of numbers, and their scores, each `[histories, k]`; exact.

        Items of the history are left out unless `seen`, and those of `left_out`, one list per history. Where fewer than k items
        are left, the number is 0.
        """
        return self.best(k, allowed).rank(self.read(histories), without(histories, seen, left_out))

    def read(self, histories: Numbers) -> Numbers:
        """The part of histories that the model reads."""
        window = self.model.spec.window
        return histories if window is None else [history[-window:] for history in histories]

    def recommend(
        self,
        histories: Sequence[Sequence[Any]],
        k: int = 10,
        seen: bool = False,
        only: Sequence[Any] | None = None,
        exclude: Sequence[Any] = (),
        where: str | None = None,
    ) -> pl.DataFrame:
        """Rank items for histories of ids or titles; `only`, `exclude` and `where` as in `allowed`.

        Returns columns `history` (its place), `rank`, `item_id`, `title` if there is one, `score`; fewer than k
        rows where no more items pass. Items that are not in the catalogue are skipped; `encode` returns them.
        """
        allowed, _ = self.allowed(only, exclude, where)
        return self.frame(*self.rank([self.encode(h)[0] for h in histories], k, seen, allowed))

    def similar(
        self,
        item: Any,
        k: int = 10,
        only: Sequence[Any] | None = None,
        exclude: Sequence[Any] = (),
        where: str | None = None,
    ) -> pl.DataFrame:
        """The items most like an item (id or title), by released values alone; filters as in `allowed`.

        Returns columns `rank`, `item_id`, `title` if there is one, `score`.
        """
        numbers, unknown = self.encode([item])
        if unknown:
            raise DPFormerError(f"{item!r} is not in the catalogue; give an id or a title of it")
        scores = self.model.similar(numbers[0])
        if scores is None:
            raise DPFormerError(
                f"nothing was released about what is like {item!r}: {self.model.spec.name} has values for the most frequent "
                "items only, or none for pairs of items; try a more frequent one"
            )
        allowed, _ = self.allowed(only, exclude, where)
        scores = scores.masked_fill(~allowed, -torch.inf) if allowed is not None else scores.clone()
        scores[[0, numbers[0]]] = -torch.inf
        values, items = top(scores[None], k)
        return self.frame(torch.where(values > -torch.inf, items, 0).numpy(), values.numpy()).drop("history")

    def frame(self, best: np.ndarray, values: np.ndarray) -> pl.DataFrame:
        """The result of `rank` as a table with one row per recommendation."""
        places, ranks = np.nonzero(best)
        frame = self.catalogue.select(pl.col("^(item_id|title)$"))[best[places, ranks] - 1]
        first = pl.DataFrame({"history": places.astype(np.int64), "rank": ranks.astype(np.int64) + 1})
        return pl.concat([first, frame, pl.DataFrame({"score": values[places, ranks]})], how="horizontal")


def without(histories: Numbers, seen: bool, left_out: Numbers | None) -> Numbers:
    """The items to leave out of each list: those of the history unless `seen`, and those of `left_out`."""
    if left_out is None:
        return [()] * len(histories) if seen else histories
    return left_out if seen else [[*history, *own] for history, own in zip(histories, left_out, strict=True)]

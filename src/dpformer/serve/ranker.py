"""Histories to ranked items: what is allowed, what is left out, many at once in one forward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from dpformer.artifact import Artifact, load
from dpformer.artifact.layout import MODEL
from dpformer.errors import DPFormerError
from dpformer.files import sha256

_MASKS = 64


@dataclass(frozen=True)
class Query:
    """One history of item numbers, and what is wanted for it. forbidden: bool `[items + 1]`, or None."""

    history: list[int]
    k: int
    exclude: list[int]
    forbidden: Tensor | None
    seen: bool


class UnknownColumnError(DPFormerError):
    """A filter names a column that the catalogue does not have."""


class Ranker:
    """A released model that answers many queries at once. name, sha256: of its run folder and of its weights."""

    def __init__(self, artifact: Artifact, name: str = "", sha256: str = "") -> None:
        self.artifact, self.name, self.sha256 = artifact, name, sha256
        catalogue = artifact.catalogue
        self.ids = catalogue["item_id"].cast(pl.String).to_list()
        has_titles = "title" in catalogue.columns
        self.titles: list[str | None] = (
            catalogue["title"].cast(pl.String).to_list() if has_titles else [None] * len(catalogue)
        )
        self.columns = [name for name in catalogue.columns if name != "item"]
        self._masks: OrderedDict[str, Tensor] = OrderedDict()
        self.answer([Query([], 1, [], None, False), Query([1], 1, [], None, False)])  # the first pass is a slow one

    def forbidden(self, filters: Mapping[str, Sequence[str]]) -> Tensor | None:
        """What the filters leave out, bool `[items + 1]`; None without filters. An item has to pass all of them."""
        if not filters:
            return None
        key = repr(sorted((column, sorted(set(values))) for column, values in filters.items()))
        if key not in self._masks:
            allowed = torch.ones(len(self.ids), dtype=torch.bool)
            for column, values in filters.items():
                if column not in self.columns:
                    raise UnknownColumnError(
                        f"the catalogue has no column {column!r} to filter on: it has {', '.join(self.columns)}"
                    )
                series = self.artifact.catalogue[column]
                wanted = pl.Series(list(values), dtype=pl.String)
                if isinstance(series.dtype, pl.List):  # an item with several values passes with any of them
                    rows = series.cast(pl.List(pl.String)).list.set_intersection(wanted.to_list()).list.len() > 0
                else:
                    rows = series.cast(pl.String).is_in(wanted.implode())
                allowed &= torch.from_numpy(rows.fill_null(False).to_numpy().copy())
            self._masks[key] = torch.cat([torch.ones(1, dtype=torch.bool), ~allowed])
        self._masks.move_to_end(key)
        while len(self._masks) > _MASKS:
            self._masks.popitem(last=False)
        return self._masks[key]

    @torch.inference_mode()
    def answer(self, queries: Sequence[Query]) -> list[list[tuple[int, float]]]:
        """Item numbers and scores for each query, best first; fewer than k where fewer are left."""
        scores = self.artifact.score_histories([q.history for q in queries], [q.seen for q in queries])
        for row, query in zip(scores, queries, strict=True):
            if query.forbidden is not None:
                row.masked_fill_(query.forbidden, -torch.inf)
            if query.exclude:
                row[torch.tensor(query.exclude, dtype=torch.int64)] = -torch.inf
        top = scores.topk(min(max(q.k for q in queries), len(self.ids)), dim=1)
        rows = zip(queries, top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            [(item, score) for item, score in zip(items[: q.k], values[: q.k], strict=True) if score > -torch.inf]
            for q, items, values in rows
        ]


def load_for_serving(run: Path, not_private: bool = False) -> Ranker:
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
    return Ranker(artifact, run.resolve().name, sha256(run / MODEL))

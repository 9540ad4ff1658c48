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
from dpformer.privacy import PrivacyStatement

BATCH = 512


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

    def scores(self, history: Tensor, lengths: Tensor) -> Tensor:
        """Scores `[B, items + 1]` of histories `[B, L]` of item numbers; see `Recommender.forward`."""
        return self.model.scores(history, lengths)

    def score_histories(self, histories: Sequence[Sequence[int]], seen: bool | Sequence[bool] = False) -> Tensor:
        """Scores `[histories, items + 1]` of histories of numbers; -inf for padding and for items of the history, unless `seen`.

        All of them at once: give a few hundred at the most.
        """
        allowed = [seen] * len(histories) if isinstance(seen, bool) else seen
        cut = [list(h[-(self.model.spec.window or len(h)) :]) for h in histories]
        tokens = torch.zeros(len(cut), max((1, *(len(h) for h in cut))), dtype=torch.int64)
        for row, history in zip(tokens, cut, strict=True):
            row[: len(history)] = torch.tensor(history, dtype=torch.int64)
        scores = self.scores(tokens, torch.tensor([len(h) for h in cut], dtype=torch.int64))
        for row, whole, keep in zip(scores, histories, allowed, strict=True):
            if not keep:
                row[torch.tensor(list(whole), dtype=torch.int64)] = -torch.inf
        return scores

    def rank(self, histories: Sequence[Sequence[int]], k: int, seen: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The best k items of each history of numbers, and their scores, each `[histories, k]`; exact.

        Items of the history are left out unless `seen`. Where fewer than k items are left, the number is 0.
        """
        if k < 1:
            raise DPFormerError(f"k = {k} is not at least 1")
        k = min(k, len(self.catalogue))
        best, values = [], []
        for start in range(0, len(histories), BATCH):
            top = self.score_histories(histories[start : start + BATCH], seen).topk(k, dim=1)
            best.append(torch.where(top.values > -torch.inf, top.indices, 0).numpy())
            values.append(top.values.numpy())
        if not best:
            return np.zeros((0, k), dtype=np.int64), np.zeros((0, k), dtype=np.float32)
        return np.concatenate(best), np.concatenate(values)

    def recommend(self, histories: Sequence[Sequence[Any]], k: int = 10, seen: bool = False) -> pl.DataFrame:
        """Rank items for histories of ids or titles.

        Returns columns `history` (its place), `rank`, `item_id`, `title` if there is one, `score`. Items that are not in
        the catalogue are skipped; `encode` returns them.
        """
        return self.frame(*self.rank([self.encode(h)[0] for h in histories], k, seen))

    def frame(self, best: np.ndarray, values: np.ndarray) -> pl.DataFrame:
        """The result of `rank` as a table with one row per recommendation."""
        places, ranks = np.nonzero(best)
        frame = pl.DataFrame(
            {
                "history": places.astype(np.int64),
                "rank": ranks.astype(np.int64) + 1,
                "item": best[places, ranks].astype(np.int32),
                "score": values[places, ranks],
            }
        )
        joined = frame.join(self.catalogue, on="item", how="left", maintain_order="left").drop("item")
        return joined.select("history", "rank", pl.exclude("history", "rank", "score"), "score")

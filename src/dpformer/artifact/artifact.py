"""A released model in use: ranked items for histories. It needs the run folder only, never the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dpformer.artifact.catalogue import read_catalogue
from dpformer.artifact.sizes import check_tensors
from dpformer.artifact.write import refuse_unfinished
from dpformer.errors import DPFormerError
from dpformer.files import read_small
from dpformer.fit.folder import ITEMS, MODEL, PRIVACY, check_catalogue, check_files, item_count, read_recipe
from dpformer.fit.recipe import STATISTICS, Recipe
from dpformer.models.ensemble import Joined
from dpformer.models.network import SequenceModel
from dpformer.models.popularity import DPPopularity
from dpformer.models.transitions import DPTransitions
from dpformer.privacy import PrivacyStatement, parse_statement

BATCH = 512
Statistics = TypeVar("Statistics", bound="DPTransitions | DPPopularity")


@dataclass
class Released:
    """A model, its catalogue, the released popularity of items `[items + 1]` (or None), recipe and privacy statement."""

    model: SequenceModel | Joined | DPTransitions | DPPopularity
    catalogue: pl.DataFrame
    popularity: Tensor | None
    recipe: Recipe
    statement: PrivacyStatement

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
        """What histories without a known item are ranked by."""
        unknown = isinstance(self.model, SequenceModel) and self.popularity is None
        return "the order of the catalogue" if unknown else "the released popularity"

    def encode(self, history: Iterable[Any]) -> tuple[list[int], list[str]]:
        """Item numbers of a history of ids or titles, and what is not in the catalogue."""
        known, unknown = [], []
        for item in history:
            number = self._numbers.get(str(item))
            if number is None:
                unknown.append(str(item))
            else:
                known.append(number)
        return known, unknown

    def split(self, history: str) -> list[str]:
        """Items of a text: parts between commas, joined again where only the joined text is in the catalogue."""
        parts, found = history.split(","), []
        while parts:
            for n in range(len(parts), 0, -1):
                text = ",".join(parts[:n]).strip()
                if n == 1 or self.encode([text])[0]:
                    found.append(text)
                    parts = parts[n:]
                    break
        return [item for item in found if item]

    @torch.no_grad()
    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Scores `[B, items + 1]` of histories `[B, L]`; without a single known item, the released popularity, else the
        order of the catalogue.
        """
        if not isinstance(self.model, SequenceModel):
            return self.model.scores(tokens, lengths)  # statistics know what to do without a history
        self.model.eval()
        scores = self.model.scores(tokens[:, : max(1, tokens.shape[1])], lengths.clamp_min(1))
        cold = lengths == 0
        if bool(cold.any()):
            fallback = -torch.arange(scores.shape[1]).float() if self.popularity is None else self.popularity.log()
            scores[cold] = fallback.index_fill(0, torch.tensor(0), -torch.inf)
        return scores

    def score_histories(self, histories: Sequence[Sequence[int]], seen: bool | Sequence[bool] = False) -> Tensor:
        """Scores `[histories, items + 1]` of histories of numbers; -inf for padding and for items of the history, unless `seen`.

        All of them at once: give a few hundred at the most.
        """
        allowed = [seen] * len(histories) if isinstance(seen, bool) else seen
        cut = [list(h[-(self.recipe.window or len(h)) :]) for h in histories]
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
        """Ranked items for histories of ids or titles: `history` (its place), `rank`, `item_id`, `title` if known, `score`.

        Items that are not in the catalogue are skipped; `encode` tells which.
        """
        return self.frame(*self.rank([self.encode(h)[0] for h in histories], k, seen))

    def frame(self, best: np.ndarray, values: np.ndarray) -> pl.DataFrame:
        """What `rank` gave, as a table with one row a recommendation."""
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


def load_model(folder: Path | str) -> Released:
    """The released model of a run folder. No code of the folder runs; sizes are checked before memory is taken (`sizes`)."""
    folder = Path(folder)
    recipe = read_recipe(folder)
    refuse_unfinished(folder)
    known = check_files(folder)
    items = item_count(folder)
    try:
        check_tensors(folder / MODEL, recipe, items)
        tensors = load_file(folder / MODEL)
        popularity = tensors.pop("popularity", None)
        model = _model(recipe, items, {name.removeprefix("model."): value for name, value in tensors.items()})
    except (OSError, ValueError, TypeError, LookupError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DPFormerError(f"{folder / MODEL}: does not fit config.json or is damaged ({reason})") from None
    catalogue = read_catalogue(folder / ITEMS, items)
    check_catalogue(folder / ITEMS, catalogue, known)
    return Released(model, catalogue, popularity, recipe, read_statement(folder))


def _model(
    recipe: Recipe, items: int, state: dict[str, Tensor]
) -> SequenceModel | Joined | DPTransitions | DPPopularity:
    if recipe.model in STATISTICS:
        return _checked(STATISTICS[recipe.model].from_state(state), items)
    prior = {name: state.pop(name) for name in list(state) if name.startswith("prior.")}
    model = recipe.build(items)
    model.load_state_dict(state)
    if not recipe.prior_share:
        return model
    found = DPTransitions.from_state({name.removeprefix("prior."): value for name, value in prior.items()})
    return Joined(model, _checked(found, items), recipe.prior_weight)


def _checked(found: Statistics, items: int) -> Statistics:
    nothing = torch.zeros(1, dtype=torch.int64)
    if found.scores(nothing[:, None], nothing).shape != (1, items + 1):
        raise ValueError(f"it scores another number of items than {items}")
    return found


def read_statement(folder: Path) -> PrivacyStatement:
    """The privacy statement of a finished run."""
    return parse_statement(read_small(folder / PRIVACY))

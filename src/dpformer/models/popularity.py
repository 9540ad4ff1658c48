"""Recommend to everybody what most people had: not privately, and from a noisy histogram."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.data import Sequences
from dpformer.errors import DPFormerError
from dpformer.privacy.query import Asker
from dpformer.statistics.histogram import Histogram, check_items, histogram_of
from dpformer.statistics.settings import HISTOGRAM


class Popularity:
    """Items by the number of their events. Not private: the counts are exact."""

    def __init__(self) -> None:
        self._scores: Tensor | None = None

    def fit(self, people: Sequences, items: int) -> "Popularity":
        """Count the events of each item 1..items."""
        check_items(people, items)
        self._scores = _as_scores(np.bincount(people.items, minlength=items + 1))
        return self

    def scores(self, s: Tensor, lengths: Tensor) -> Tensor:
        """[B, items + 1] for item ids s [B, L]: the same row for everybody; entry 0 is -inf."""
        return _rows(self._scores, len(s))

    def state(self) -> dict[str, Tensor]:
        """The exact counts: not to be released."""
        return {"scores": _rows(self._scores, 1)[0]}


class DPPopularity:
    """Items by a noisy histogram in which each user has one vector of norm 1: one Gaussian mechanism.

    `state()` is the release itself.
    """

    shares = {HISTOGRAM: 1.0}  # noqa: RUF012

    def __init__(self, last: int = 2000) -> None:
        self.last = last
        self._scores: Tensor | None = None

    def fit(self, asker: Asker, items: int, prefix: str = "") -> "DPPopularity":
        """Ask for the histogram: nothing else is looked at. prefix: stands before its name in the asker's plan."""
        self._scores = _as_scores(histogram_of(asker.ask(Histogram(items, self.last, prefix + HISTOGRAM))))
        return self

    def scores(self, s: Tensor, lengths: Tensor) -> Tensor:
        """[B, items + 1] for item ids s [B, L]: the same row for everybody; entry 0 is -inf."""
        return _rows(self._scores, len(s))

    def state(self) -> dict[str, Tensor]:
        """What was released."""
        return {"scores": _rows(self._scores, 1)[0]}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "DPPopularity":
        """A model that scores like the one that `state` was taken from."""
        model = cls()
        model._scores = state["scores"]
        return model


def _as_scores(counts: Any) -> Tensor:
    scores = torch.as_tensor(counts, dtype=torch.float32).clone()
    scores[0] = -torch.inf
    return scores


def _rows(scores: Tensor | None, count: int) -> Tensor:
    if scores is None:
        raise DPFormerError("this model has not been fitted; call fit first")
    return scores.repeat(count, 1)

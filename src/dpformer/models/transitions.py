"""DP transition statistics as a recommender: what follows what, released with noise, and no network."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.errors import DPFormerError
from dpformer.privacy.query import Asker
from dpformer.statistics.combine import Measured, measure
from dpformer.statistics.score_matrix import score_matrix
from dpformer.statistics.settings import TransitionSettings


@dataclass(frozen=True)
class Fitted:
    """Functions of released values alone; ready to save.

    head: int64 [P], item ids, most frequent first. matrix: float32 [P + 1, P]; row P, of items outside the head, is 0.
    prior: float32 [P], the weighted log-popularity of the head. tail: float32 [items + 1], 0 for the head; for the others
    -1, -2, ... in the order of the noisy histogram; -inf for padding.
    """

    head: Tensor
    matrix: Tensor
    prior: Tensor
    tail: Tensor


class DPTransitions:
    """Scores the next item by the released transitions from the last items of the history.

        score_j = sum over the last 15 items of the history in the head, k-th to last, of M[s_(n+1-k), j] / k  +  .1 log h_j

    Items outside the head are dropped from histories, and rank below the head, among themselves by the noisy histogram.
    With shares that sum to 1 a fit is exactly one Gaussian mechanism; `shares` says how it is divided.
    """

    def __init__(self, settings: TransitionSettings | None = None) -> None:
        self.settings = settings or TransitionSettings()
        self.measured: Measured | None = None
        self._fitted: Fitted | None = None

    @property
    def shares(self) -> dict[str, float]:
        """The name and the share of each answer, known before anything is asked."""
        return self.settings.shares

    def fit(self, asker: Asker, items: int, prefix: str = "") -> "DPTransitions":
        """Ask for the statistics and post-process the answers: nothing else is looked at.

        items: of the catalogue. prefix: stands before the names of `shares` in the asker's plan.
        """
        self.measured = measure(asker, items, self.settings, prefix)
        self._fitted = _finish(self.measured, self.settings)
        return self

    @torch.no_grad()
    def scores(self, s: Tensor, lengths: Tensor) -> Tensor:
        """[B, items + 1], float32, entry 0 is -inf; s: item ids [B, L], oldest first; lengths [B], 0 for an empty history."""
        fitted = self._done()
        size, items = len(fitted.head), len(fitted.tail)
        place = torch.full((items,), size)
        place[fitted.head] = torch.arange(size)
        recent, weight = _last_of_head(place[s], lengths, size, self.settings.window)
        head = F.embedding_bag(recent, fitted.matrix, per_sample_weights=weight, mode="sum") + fitted.prior
        result = head.amin(1, keepdim=True) + fitted.tail
        result[:, fitted.head] = head
        return result

    def popularity(self) -> Tensor:
        """How frequent items are, `[items + 1]`, up to a factor: the noisy histogram in the head, below it only an order."""
        fitted = self._done()
        head = torch.exp(fitted.prior / self.settings.popularity)
        lowest = head.amin() if len(head) else torch.ones(())
        result = torch.where(fitted.tail < 0, lowest / (1 - fitted.tail), 0.0)
        result[fitted.head] = head
        return result

    def state(self) -> dict[str, Tensor]:
        """All that `scores` needs, of released values alone."""
        return dict(vars(self._done()))

    @classmethod
    def from_state(cls, state: dict[str, Tensor], settings: TransitionSettings | None = None) -> "DPTransitions":
        """A model that scores like the one that `state` was taken from; a `ValueError` if it cannot be the state of one."""
        model = cls(settings)
        fitted = Fitted(**state)
        size, items = len(fitted.head), len(fitted.tail) - 1
        shapes = [tuple(t.shape) for t in (fitted.head, fitted.matrix, fitted.prior, fitted.tail)]
        if shapes != [(size,), (size + 1, size), (size,), (items + 1,)] or fitted.head.dtype != torch.int64:
            raise ValueError(f"head, matrix, prior and tail have shapes {shapes}, which do not belong together")
        if size and not 1 <= int(fitted.head.min()) <= int(fitted.head.max()) <= items:
            raise ValueError(f"the head holds items outside 1..{items}")
        model._fitted = fitted
        return model

    def _done(self) -> Fitted:
        if self._fitted is None:
            raise DPFormerError("this model has not been fitted; call fit first")
        return self._fitted


def _finish(measured: Measured, settings: TransitionSettings) -> Fitted:
    size, items = len(measured.head), len(measured.histogram)
    matrix = np.zeros((size + 1, size))
    matrix[:size] = score_matrix(measured, settings)
    others = np.ones(items, dtype=bool)
    others[0] = others[measured.head] = False
    order = np.flatnonzero(others)
    order = order[np.argsort(-measured.histogram[order], kind="stable")]
    tail = np.zeros(items)
    tail[order] = -1 - np.arange(len(order))
    tail[0] = -np.inf
    return Fitted(
        head=torch.from_numpy(measured.head),
        matrix=torch.from_numpy(matrix).float(),
        prior=torch.from_numpy(settings.popularity * np.log(measured.h / measured.h.mean())).float(),
        tail=torch.from_numpy(tail).float(),
    )


def _last_of_head(place: Tensor, lengths: Tensor, size: int, window: int) -> tuple[Tensor, Tensor]:
    """The last `window` places below `size` of each row, newest first, [B, window], and weights 1 / k, [B, window].

    place: [B, L]; what stands at or after a row's length does not count. Missing ones are `size`.
    """
    inside = (place < size) & (torch.arange(place.shape[1]) < lengths[:, None])
    # How many of the head stand here or later: the k-th to last has k.
    k = inside.flip(1).cumsum(1).flip(1)
    row, column = torch.nonzero(inside & (k <= window), as_tuple=True)
    recent = torch.full((len(place), window), size)
    recent[row, k[row, column] - 1] = place[row, column]
    weight = (1 / torch.arange(1, window + 1)).expand(len(place), window).contiguous()
    return recent, weight

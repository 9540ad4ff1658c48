"""Score items by released transitions from the last items of a history.

This one implementation ranks, teaches a network (`fit.distil`), and is the graph that is exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from dpformer.models.recommender import Recommender, Scores, Spec, first_of, last_kept, register, restore


class TransitionsSpec(Spec):
    """head: how many items have transitions. recent: items of the history that count. popularity: weight of log h in `prior`."""

    kind: Literal["transitions"] = "transitions"
    head: int = Field(ge=1)
    recent: int = Field(default=15, ge=1, le=1000)
    popularity: float = Field(default=0.1, ge=0)


@register("transitions", TransitionsSpec)
class TransitionScorer(Recommender):
    """Scores the next item by the transitions from the last items of the history.

        score_j = sum over the last 15 items of the history in the head, k-th to last, of M[s_(n+1-k), j] / k  +  prior_j

    Items outside the head are dropped from histories, and rank below the head, among themselves by `tail`. All tensors are
    functions of released values:

    head    int64 [P], item numbers, most frequent first
    matrix  float32 [P + 1, P], M; row P, of items outside the head, is 0
    prior   float32 [P], the weighted log-popularity of the head
    tail    float32 [items + 1], 0 for the head; -1, -2, ... in the order of the noisy histogram for the others; -inf for padding
    """

    spec: TransitionsSpec

    def __init__(self, spec: TransitionsSpec) -> None:
        super().__init__(spec)
        self.head: Tensor
        self.matrix: Tensor
        self.prior: Tensor
        self.tail: Tensor
        self.register_buffer("head", torch.arange(1, spec.head + 1))
        self.register_buffer("matrix", torch.zeros(spec.head + 1, spec.head))
        self.register_buffer("prior", torch.zeros(spec.head))
        self.register_buffer("tail", torch.zeros(spec.items + 1))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], recent: int = 15, popularity: float = 0.1) -> TransitionScorer:
        """Make the scorer from its four tensors; a ValueError if their shapes do not fit."""
        items, head = len(tensors["tail"]) - 1, len(tensors["head"])
        spec = TransitionsSpec(items=items, head=head, recent=recent, popularity=popularity)
        model = restore(spec, tensors)
        assert isinstance(model, TransitionScorer)
        return model

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        """The formula above; `prior` and `tail` alone for an empty history."""
        return self._columns(history, lengths, self._places(), slice(None))

    def _places(self) -> Tensor:
        """The place in the head of each item, `[items + 1]`; P outside of it."""
        numbers = torch.arange(self.spec.head, device=self.head.device)
        return torch.full_like(self.tail, self.spec.head, dtype=torch.int64).scatter(0, self.head, numbers)

    def _columns(self, history: Tensor, lengths: Tensor, place: Tensor, items: Tensor | slice) -> Tensor:
        """Scores of these items."""
        size, recent = self.spec.head, self.spec.recent
        places = place[history]
        inside = torch.arange(history.shape[1], device=history.device) < lengths[:, None]
        last, _ = last_kept(places, inside & (places < size), recent, size)
        weights = (1 / torch.arange(1, recent + 1, device=history.device)).expand(last.shape[0], -1).contiguous()
        head = F.embedding_bag(last, self.matrix, per_sample_weights=weights, mode="sum") + self.prior
        # One more column, for all items outside the head: they stand below its least score.
        return torch.cat([head, head.amin(1, keepdim=True)], 1)[:, place[items]] + self.tail[items]

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        """The head, and the first items outside of it."""
        head = self._places() < self.spec.head
        return torch.cat([(allowed & head).nonzero()[:, 0], first_of(self.tail, allowed & ~head, best)])

    def scorer(self, items: Tensor) -> Scores:
        """`forward` for some columns."""
        place = self._places()
        return lambda history, lengths: self._columns(history, lengths, place, items)

    def similar(self, item: int) -> Tensor | None:
        """The cosine of what follows and what goes before: rows and columns of M."""
        place = self._places()
        if place[item] == self.spec.head:
            return None
        both = F.normalize(torch.cat([self.matrix[:-1], self.matrix[:-1].T], 1), dim=1)
        return torch.cat([both @ both[place[item]], both.new_full((1,), -torch.inf)])[place]

    def popularity(self) -> Tensor | None:
        """The noisy histogram over its mean, in the head; of the other items only the order was released."""
        if not self.spec.popularity:
            return None
        return torch.zeros_like(self.tail).scatter(0, self.head, torch.exp(self.prior / self.spec.popularity))

    def renumbered(self, rows: Tensor, count: int) -> TransitionScorer:
        """The same scores over other numbers: item i is `rows[i]` of 1..count, `[items + 1]`, or left out where that is 0.

        Numbers of items outside the head score -inf. The head comes in the order of the new numbers.
        """
        own = rows[self.head]
        order = own.argsort(stable=True)
        order = order[own[order] > 0]
        tail = torch.full((count + 1,), -torch.inf).scatter(0, own[order], 0.0)
        tensors = {
            "head": own[order],
            "matrix": F.pad(self.matrix[order][:, order], (0, 0, 0, 1)),
            "prior": self.prior[order],
            "tail": tail,
        }
        return TransitionScorer.of(tensors, self.spec.recent, self.spec.popularity)

    def check(self) -> None:
        """The head must be items of the catalogue."""
        if not 1 <= int(self.head.min()) <= int(self.head.max()) <= self.spec.items:
            raise ValueError(f"the head holds items outside 1..{self.spec.items}")

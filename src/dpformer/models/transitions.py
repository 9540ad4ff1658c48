"""Models made of released statistics: popularity, and transitions from the last items of a history.

This one implementation of the transitions ranks, teaches a network (`fit.distil`), and is the graph that is exported.
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
    """head: how many items have transitions. recent: items of the history that count. popularity: weight of log h in `prior`.

    features: the width of `sources` and `targets`; 0 without public features of items.
    """

    kind: Literal["transitions"] = "transitions"
    head: int = Field(ge=1)
    recent: int = Field(default=15, ge=1, le=1000)
    popularity: float = Field(default=0.1, ge=0)
    features: int = Field(default=0, ge=0)


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

    With public features all items of the history count, and all items are scored alike: `tail` has the weighted log-popularity of
    the others, M is what is left of the transitions, and

        score_j += sum over the last 15 items of the history, k-th to last, of <sources[s_(n+1-k)], targets[j]> / k.

    sources, targets  float32 [items + 1, features]; see `statistics.features`
    """

    spec: TransitionsSpec
    head: Tensor
    matrix: Tensor
    prior: Tensor
    tail: Tensor
    sources: Tensor | None
    targets: Tensor | None

    def __init__(self, spec: TransitionsSpec) -> None:
        super().__init__(spec)
        self.register_buffer("head", torch.arange(1, spec.head + 1))
        self.register_buffer("matrix", torch.zeros(spec.head + 1, spec.head))
        self.register_buffer("prior", torch.zeros(spec.head))
        self.register_buffer("tail", torch.zeros(spec.items + 1))
        for name in ("sources", "targets"):
            self.register_buffer(name, torch.zeros(spec.items + 1, spec.features) if spec.features else None)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], recent: int = 15, popularity: float = 0.1) -> TransitionScorer:
        """Make the scorer from its tensors; a ValueError if their shapes do not fit."""
        items, head = len(tensors["tail"]) - 1, len(tensors["head"])
        width = tensors["targets"].shape[1] if "targets" in tensors else 0
        spec = TransitionsSpec(items=items, head=head, recent=recent, popularity=popularity, features=width)
        model = restore(spec, tensors)
        assert isinstance(model, TransitionScorer)
        return model

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        return self._columns(history, lengths, self._places(), slice(None))

    def _places(self) -> Tensor:
        """The place in the head of each item, `[items + 1]`; P outside of it."""
        numbers = torch.arange(self.spec.head, device=self.head.device)
        return torch.full_like(self.tail, self.spec.head, dtype=torch.int64).scatter(0, self.head, numbers)

    def _columns(self, history: Tensor, lengths: Tensor, place: Tensor, items: Tensor | slice) -> Tensor:
        size, recent = self.spec.head, self.spec.recent
        keep = torch.arange(history.shape[1], device=history.device) < lengths[:, None]
        if self.sources is None:
            places = place[history]
            last, _ = last_kept(places, keep & (places < size), recent, size)
        else:
            numbers, _ = last_kept(history, keep, recent, 0)
            last = place[numbers]
        weights = (1 / torch.arange(1, recent + 1, device=history.device)).expand(last.shape[0], -1).contiguous()
        head = F.embedding_bag(last, self.matrix, per_sample_weights=weights, mode="sum") + self.prior
        if self.sources is None or self.targets is None:
            # One more column, for all items outside the head: they stand below its least score.
            return torch.cat([head, head.amin(1, keepdim=True)], 1)[:, place[items]] + self.tail[items]
        profile = F.embedding_bag(numbers, self.sources, per_sample_weights=weights, mode="sum")
        return F.pad(head, (0, 1))[:, place[items]] + profile @ self.targets[items].T + self.tail[items]

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        """The head, and the first items outside of it; with features every item may be among the best."""
        if self.targets is not None:
            return super().candidates(best, allowed)
        head = self._places() < self.spec.head
        return torch.cat([(allowed & head).nonzero()[:, 0], first_of(self.tail, allowed & ~head, best)])

    def scorer(self, items: Tensor) -> Scores:
        place = self._places()
        return lambda history, lengths: self._columns(history, lengths, place, items)

    def similar(self, item: int) -> Tensor | None:
        """The cosine of what follows and what goes before: rows and columns of M; outside the head, what features predict."""
        place = self._places()
        if place[item] == self.spec.head:
            if self.sources is None or self.targets is None:
                return None
            unit = torch.cat([F.normalize(self.sources, dim=1), F.normalize(self.targets, dim=1)], 1)
            return (unit @ unit[item]).masked_fill(self.tail == -torch.inf, -torch.inf)
        M = self.within_head()
        both = F.normalize(torch.cat([M, M.T], 1), dim=1)
        return torch.cat([both @ both[place[item]], both.new_full((1,), -torch.inf)])[place]

    def popularity(self) -> Tensor | None:
        """The noisy histogram over its mean, in the head; of the other items only the order was released, without features."""
        if not self.spec.popularity:
            return None
        others = torch.zeros_like(self.tail) if self.targets is None else torch.exp(self.tail / self.spec.popularity)
        return others.scatter(0, self.head, torch.exp(self.prior / self.spec.popularity))

    def within_head(self) -> Tensor:
        """All that an item of the head adds to the score of another, `[P, P]`."""
        M = self.matrix[:-1]
        if self.sources is None or self.targets is None:
            return M
        return M + self.sources[self.head] @ self.targets[self.head].T

    def with_others(self, factor: float) -> TransitionScorer:
        """Multiply what features predict for items outside the head, so that they stand beside scores of the head that were."""
        assert self.targets is not None
        outside = self._places() == self.spec.head
        targets = torch.where(outside[:, None], factor * self.targets, self.targets)
        return TransitionScorer.of({**self.state_dict(), "targets": targets}, self.spec.recent, self.spec.popularity)

    def renumbered(self, rows: Tensor, count: int) -> TransitionScorer:
        """The same scores over other numbers: item i is `rows[i]` of 1..count, `[items + 1]`, or left out where that is 0.

        Numbers of items outside the head score -inf. The head comes in the order of the new numbers. What features add is in M.
        """
        own = rows[self.head]
        order = own.argsort(stable=True)
        order = order[own[order] > 0]
        tail = torch.full((count + 1,), -torch.inf).scatter(0, own[order], 0.0)
        tensors = {
            "head": own[order],
            "matrix": F.pad(self.within_head()[order][:, order], (0, 0, 0, 1)),
            "prior": self.prior[order],
            "tail": tail,
        }
        return TransitionScorer.of(tensors, self.spec.recent, self.spec.popularity)

    def check(self) -> None:
        if not 1 <= int(self.head.min()) <= int(self.head.max()) <= self.spec.items:
            raise ValueError(f"the head holds items outside 1..{self.spec.items}")


class PopularitySpec(Spec):
    """floor: counts below it cannot be distinguished from 0; the standard deviation of the noise, or 0 for exact counts."""

    kind: Literal["popularity"] = "popularity"
    floor: float = Field(default=0.0, ge=0)


@register("popularity", PopularitySpec)
class Popularity(Recommender):
    """Items by their counts `[items + 1]`, entry 0 is -inf. It is private if the counts are."""

    spec: PopularitySpec

    def __init__(self, spec: PopularitySpec) -> None:
        super().__init__(spec)
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(spec.items + 1))

    @classmethod
    def of(cls, counts: Tensor, floor: float = 0.0) -> Popularity:
        """Make the model from counts `[items + 1]`; entry 0 is not read."""
        floats = counts.to(torch.float32, copy=True)
        floats[0] = -torch.inf
        model = restore(PopularitySpec(items=len(floats) - 1, floor=floor), {"counts": floats})
        assert isinstance(model, Popularity)
        return model

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        return self.counts.expand(history.shape[0], -1).clone()

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        return first_of(self.counts, allowed, best)

    def scorer(self, items: Tensor) -> Scores:
        counts = self.counts[items]
        return lambda history, lengths: counts.repeat(history.shape[0], 1)

    def popularity(self) -> Tensor:
        return torch.cat([self.counts.new_zeros(1), self.counts[1:].clamp_min(self.spec.floor)])

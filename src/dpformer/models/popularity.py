"""The same ranking for every history: by counts, released with noise or exact."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from dpformer.models.recommender import Recommender, Scores, Spec, first_of, register, restore


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
        """The counts, for every history."""
        return self.counts.expand(history.shape[0], -1).clone()

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        """The most frequent items."""
        return first_of(self.counts, allowed, best)

    def scorer(self, items: Tensor) -> Scores:
        """Their counts."""
        counts = self.counts[items]
        return lambda history, lengths: counts.repeat(history.shape[0], 1)

    def popularity(self) -> Tensor:
        """The counts, at least the floor."""
        return torch.cat([self.counts.new_zeros(1), self.counts[1:].clamp_min(self.spec.floor)])

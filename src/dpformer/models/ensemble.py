"""A network trained by DP-SGD and DP transition statistics, paid from one budget: their scores are added."""

from __future__ import annotations

import torch
from torch import Tensor

from dpformer.models.network import SequenceModel
from dpformer.models.transitions import DPTransitions

# Items outside the statistics' head have scores that only order them, far below all others: there the network decides.
FLOOR = -50.0


class Joined:
    """`score = network + weight * statistics`, of all items `[B, items + 1]`.

    The two see different things: the statistics have a number for each pair of frequent items, the network has few numbers and
    shares them among all. Their noise is independent, and adding them averages it.
    """

    def __init__(self, network: SequenceModel, prior: DPTransitions, weight: float) -> None:
        self.network, self.prior, self.weight = network, prior, weight

    @torch.no_grad()
    def scores(self, s: Tensor, lengths: Tensor) -> Tensor:
        """`[B, items + 1]` for histories `[B, L]` of `lengths` `[B]`; an empty one is scored by the statistics alone."""
        self.network.eval()
        prior = self.prior.scores(s, lengths)
        found = self.network.scores(s, lengths.clamp_min(1)) + self.weight * prior.clamp_min(FLOOR)
        return torch.where((lengths == 0)[:, None], prior, found)

    def state(self) -> dict[str, Tensor]:
        """The tensors of both."""
        return {**self.network.state_dict(), **{f"prior.{name}": value for name, value in self.prior.state().items()}}

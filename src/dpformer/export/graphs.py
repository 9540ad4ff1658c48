"""What is exported: modules of plain tensor operations, from item numbers and lengths to a hidden state or to scores.

Item numbers are 1..M as in `items.jsonl`, 0 is padding and stands at the end; lengths are at least 1.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dpformer.artifact.artifact import Released
from dpformer.errors import DPFormerError
from dpformer.models.ensemble import Joined
from dpformer.models.network import SequenceModel
from dpformer.models.transformer import Transformer
from dpformer.models.transitions import DPTransitions


@dataclass(frozen=True)
class Graph:
    """A module to export. `output`: what it gives, "state" `[B, d]` or "scores" `[B, items + 1]`.

    length: how many items the history must be padded to; None for any number. table `[items + 1, d]` and bias `[items + 1]` turn
    states into scores: `state @ table.T + bias`.
    """

    module: nn.Module
    output: Literal["state", "scores"]
    length: int | None
    table: Tensor | None
    bias: Tensor | None

    def example(self, batch: int = 2) -> tuple[Tensor, Tensor]:
        """Inputs of the right shape."""
        return torch.ones(batch, self.length or 3, dtype=torch.int64), torch.full((batch,), 2, dtype=torch.int64)


class LastState(nn.Module):
    """History `[B, L]` and lengths `[B]` to the hidden state after the last item, `[B, d]`.

    States depend on items up to their own place alone, so padding at the end changes nothing.
    """

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        if isinstance(self.model, Transformer):
            self.model.tracked = self.model.tracks_errors()  # a fact of the release: a graph cannot ask

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        """The state that scores are made from."""
        states = self.model(history)
        place = (lengths - 1)[:, None, None].expand(-1, 1, states.shape[2])
        return states.gather(1, place)[:, 0]


class TransitionScores(nn.Module):
    """`DPTransitions.scores` without loops and scatters: history `[B, L]`, lengths `[B]` to scores `[B, items + 1]`.

    score_j = sum_t M[s_t, j] / k_t + prior_j,    k_t = how many items of the head stand at t or later, up to the window
    """

    def __init__(self, model: DPTransitions) -> None:
        super().__init__()
        state = model.state()
        size, items = len(state["head"]), len(state["tail"])
        place = torch.full((items,), size)
        place[state["head"]] = torch.arange(size)
        self.size, self.window = size, model.settings.window
        for name, value in {**state, "place": place}.items():
            self.register_buffer(name, value.clone())
        self.place: Tensor
        self.matrix: Tensor
        self.prior: Tensor
        self.tail: Tensor

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        """All scores."""
        place = self.place[history]
        inside = (place < self.size) & (torch.arange(history.shape[1]) < lengths[:, None])
        counted = inside.to(torch.float32)
        k = counted.sum(1, keepdim=True) - counted.cumsum(1) + counted
        weight = torch.where(inside & (k <= self.window), 1 / k.clamp_min(1), torch.zeros(()))
        head = (weight[:, None] @ self.matrix[place])[:, 0] + self.prior
        # One more column, for everything outside the head.
        least = head.amin(1, keepdim=True)
        return torch.cat([head, least], 1)[:, self.place] + self.tail


def graph_of(released: Released) -> Graph:
    """The graph of a released model; a model that has nothing to compute is refused."""
    model = released.model
    if isinstance(model, SequenceModel):
        bias = model.output_bias.detach().clone()
        return Graph(LastState(model), "state", released.recipe.window, model.table.detach().clone(), bias)
    if isinstance(model, Joined):
        raise DPFormerError(
            "a network with a prior is two models, and has no graph of its own: fit one with prior_share=0, or "
            "--model transitions, and export that"
        )
    if isinstance(model, DPTransitions):
        return Graph(TransitionScores(model).eval(), "scores", None, None, None)
    raise DPFormerError(
        "popularity ranks the same for everybody, so there is no graph to export: write the list with "
        '`dpformer recommend RUN --history "" -k 100 -o top.csv`'
    )

"""What all sequence models have in common: items in, hidden states out, and a table to score all items with."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SequenceModel(nn.Module):
    """Item ids 1..items, 0 is padding and stands at the end: `[B, L]` to hidden states `[B, L, d]`.

    The output table is the input embedding (`tied`) or one of its own. State t depends on items up to t alone.
    """

    def __init__(self, items: int, d: int, tied: bool = True) -> None:
        super().__init__()
        self.items = items
        self.embedding = nn.Embedding(items + 1, d, padding_idx=0)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output = None if tied else nn.Embedding(items + 1, d)
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=0.02)
        # Padding is no item: a fixed bias takes it out of every softmax and ranking.
        bias = torch.zeros(items + 1)
        bias[0] = -torch.inf
        self.output_bias: Tensor
        self.register_buffer("output_bias", bias)

    @property
    def table(self) -> Tensor:
        """The output table, `[items + 1, d]`."""
        return self.embedding.weight if self.output is None else self.output.weight

    def forward(self, s: Tensor) -> Tensor:
        """Hidden states `[B, L, d]` of item ids `[B, L]`."""
        raise TypeError("SequenceModel is a base class: use Transformer, GRURecommender or LSTMRecommender")

    def scores(self, s: Tensor, lengths: Tensor) -> Tensor:
        """Scores of all items as the next one, `[B, items + 1]`; lengths `[B]` (at least 1) of the sequences `s` `[B, L]`."""
        last = self(s)[torch.arange(len(s), device=s.device), lengths - 1]
        return torch.addmm(self.output_bias, last, self.table.T)

"""What all sequence models have in common: items in, hidden states out, and a table to score all items with."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SequenceModel(nn.Module):
    """Item ids 1..items, 0 is padding and stands at the end: `[B, L]` to hidden states `[B, L, d]`.

    The output table is the input embedding (`tied`) or one of its own. State t depends on items up to t alone.

    With a `vocabulary` the model learns that many items alone, so that noise falls on few rows: which ones, `choose` tells it.
    It then reads and predicts `places` 1..vocabulary among them; `locate` drops the others from a history. `scores` speaks of all
    items as ever: those outside the vocabulary have no embedding and get their output bias.
    """

    def __init__(
        self,
        items: int,
        d: int,
        tied: bool = True,
        vocabulary: int | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.items, self.max_length = items, max_length
        rows = items if vocabulary is None else min(vocabulary, items)
        self.embedding = self._make_table(rows + 1, d, padding_idx=0)
        self.output = None if tied else self._make_table(rows + 1, d, padding_idx=None)
        # Padding is no item: a fixed bias takes it out of every softmax and ranking.
        bias = torch.zeros(items + 1)
        bias[0] = -torch.inf
        self.output_bias: Tensor
        self.register_buffer("output_bias", bias)
        # The items of the vocabulary by their rows; row 0 is the padding.
        self.chosen: Tensor | None
        self.register_buffer("chosen", None if vocabulary is None else torch.arange(rows + 1))

    def _make_table(self, count: int, d: int, padding_idx: int | None) -> nn.Embedding:
        whole = nn.Embedding(count, d, padding_idx)
        nn.init.normal_(whole.weight, std=0.02)
        return whole

    @property
    def table(self) -> Tensor:
        """The output table, `[rows + 1, d]`."""
        return self.embedding.weight if self.output is None else self.output.weight

    @property
    def table_bias(self) -> Tensor:
        """The output bias of the table's rows, `[rows + 1]`."""
        return self.output_bias if self.chosen is None else self.output_bias[self.chosen]

    def choose(self, frequencies: Tensor, bias: bool) -> None:
        """Take the most frequent items as vocabulary, if there is one; and with `bias` log frequencies as output bias.

        frequencies `[items + 1]`: public or released ones, above 0; row 0 is not read. Ties go by the catalogue.
        """
        if frequencies.shape != (self.items + 1,):
            raise ValueError(f"wanted frequencies [{self.items + 1}], not {tuple(frequencies.shape)}")
        if self.chosen is not None:
            order = frequencies[1:].argsort(descending=True, stable=True) + 1
            self.chosen[1:] = order[: len(self.chosen) - 1]
        if bias:
            self.output_bias[1:] = (frequencies[1:] / frequencies[1:].sum()).log()

    def places(self) -> Tensor:
        """The row of each item, `[items + 1]`, int64; 0 for those outside the vocabulary."""
        if self.chosen is None:
            return torch.arange(self.items + 1)
        places = torch.zeros(self.items + 1, dtype=torch.int64)
        places[self.chosen] = torch.arange(len(self.chosen))
        return places

    def locate(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `[B, L]` of item ids `[B, L]`, those outside the vocabulary dropped and the rest moved up; and lengths `[B]`.

        >>> model = SequenceModel(4, 2, vocabulary=2)
        >>> model.choose(torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4]), bias=False)
        >>> model.locate(torch.tensor([[1, 3, 2, 4], [4, 1, 0, 0]]))  # item 4 has row 1, item 3 row 2
        (tensor([[2, 1, 0, 0],
                [1, 0, 0, 0]]), tensor([2, 1]))
        """
        rows = self.places()[s]
        order = (rows == 0).to(torch.uint8).argsort(dim=1, stable=True)
        return rows.gather(1, order), (rows > 0).sum(1)

    def forward(self, s: Tensor) -> Tensor:
        """Hidden states `[B, L, d]` of rows `[B, L]`: item ids, or places in the vocabulary if there is one."""
        raise TypeError("SequenceModel is a base class: use Transformer, GRURecommender or LSTMRecommender")

    def scores(self, s: Tensor, lengths: Tensor) -> Tensor:
        """Scores of all items as the next one, `[B, items + 1]`; lengths `[B]` (at least 1) of the sequences `s` `[B, L]`.

        With a vocabulary: from the last `max_length` items that are in it; without a single one, the output bias.
        """
        if self.chosen is None:
            last = self(s)[torch.arange(len(s), device=s.device), lengths - 1]
            return torch.addmm(self.output_bias, last, self.table.T)
        rows, lengths = self.locate(s)
        width = max(1, min(int(lengths.max()), self.max_length or rows.shape[1]))
        start = (lengths - width).clamp_min(0)
        rows = rows.gather(1, start[:, None] + torch.arange(width))
        last = self(rows)[torch.arange(len(s)), (lengths - start - 1).clamp_min(0)]
        last = last.masked_fill((lengths == 0)[:, None], 0)
        scores = self.output_bias.expand(len(s), -1).clone()
        scores[:, self.chosen[1:]] += last @ self.table[1:].T
        return scores

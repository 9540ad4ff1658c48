"""Networks over item embeddings: rows of a table in, hidden states out, and the table again to score items with."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.models.recommender import Recommender, Scores, Spec, first_of, last_kept


class NetworkSpec(Spec):
    """What all networks have.

    vocabulary: learn this many items only, the most frequent ones; None for all. tied: the output table is the input embedding.
    frequencies: released item frequencies are part of the model, and answer empty histories.
    """

    max_length: int = Field(default=50, ge=1, le=10**6)
    d: int = Field(default=64, ge=1, le=2**14)
    tied: bool = True
    dropout: float = Field(default=0.0, ge=0, lt=1)
    vocabulary: int | None = Field(default=None, ge=1)
    frequencies: bool = False

    @property
    def window(self) -> int | None:
        """All, if there is a vocabulary: items outside of it are dropped before the history is cut."""
        return None if self.vocabulary is not None else self.max_length

    @property
    def rows(self) -> int:
        return self.items if self.vocabulary is None else min(self.vocabulary, self.items)


class Network(Recommender):
    """Item ids 1..items, 0 is padding and stands at the end. State t depends on items up to t alone.

    With a `vocabulary` the network learns that many items alone, so that noise falls on few rows; `choose` sets which ones.
    `states` then reads rows 1..vocabulary of its table, and `locate` gives the rows of a history, without the other items.
    Scores are of all items as ever: those outside the vocabulary have no embedding and get their output bias.
    """

    spec: NetworkSpec

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self.embedding = _table(spec.rows + 1, spec.d, padding_idx=0)
        self.output = None if spec.tied else _table(spec.rows + 1, spec.d, padding_idx=None)
        # Padding is no item: a fixed bias takes it out of every softmax and ranking.
        bias = torch.zeros(spec.items + 1)
        bias[0] = -torch.inf
        self.output_bias: Tensor
        self.register_buffer("output_bias", bias)
        # The items of the vocabulary by their rows; row 0 is the padding.
        self.chosen: Tensor | None
        self.register_buffer("chosen", None if spec.vocabulary is None else torch.arange(spec.rows + 1))
        self.frequencies: Tensor | None
        self.register_buffer("frequencies", torch.ones(spec.items + 1) if spec.frequencies else None)

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

        frequencies `[items + 1]`: public or released ones (above 0 with `bias`); row 0 is not read. Ties go by the catalogue.
        """
        if frequencies.shape != self.output_bias.shape:
            raise ValueError(f"wanted frequencies [{self.spec.items + 1}], not {tuple(frequencies.shape)}")
        if self.chosen is not None:
            order = frequencies[1:].argsort(descending=True, stable=True) + 1
            self.chosen[1:] = order[: len(self.chosen) - 1]
        if bias:
            self.output_bias[1:] = (frequencies[1:] / frequencies[1:].sum()).log()

    def places(self) -> Tensor:
        """The row of each item, `[items + 1]`, int64; 0 for those outside the vocabulary."""
        if self.chosen is None:
            return torch.arange(self.spec.items + 1, device=self.output_bias.device)
        rows = torch.arange(len(self.chosen), device=self.chosen.device)
        return rows.new_zeros(self.spec.items + 1).scatter(0, self.chosen, rows)

    def _rows(self, items: Tensor) -> Tensor:
        return items if self.chosen is None else self.places()[items]

    def locate(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `[B, L]` of item ids `[B, L]`, those outside the vocabulary dropped and the rest moved up; and lengths `[B]`.

        >>> model = Network(NetworkSpec(kind="network", items=4, d=2, vocabulary=2))
        >>> model.choose(torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4]), bias=False)
        >>> model.locate(torch.tensor([[1, 3, 2, 4], [4, 1, 0, 0]]))  # item 4 has row 1, item 3 row 2
        (tensor([[2, 1, 0, 0],
                [1, 0, 0, 0]]), tensor([2, 1]))
        """
        rows = self._rows(s)
        return _oldest_first(*last_kept(rows, rows > 0, s.shape[1], 0))

    def states(self, rows: Tensor) -> Tensor:
        """Hidden states `[B, L, d]` of rows `[B, L]` of the table, L at most `max_length`."""
        raise NotImplementedError

    def last_state(self, history: Tensor, lengths: Tensor) -> Tensor:
        """The hidden state `[B, d]` after the last of the items (of the vocabulary); 0 without a single one."""
        rows = self._rows(history)
        keep = (rows > 0) & (torch.arange(history.shape[1], device=history.device) < lengths[:, None])
        width = self.spec.max_length
        if not torch.compiler.is_compiling():  # a graph has one width for all histories
            width = max(1, min(width, history.shape[1]))
        rows, count = _oldest_first(*last_kept(rows, keep, width, 0))
        states = self.states(rows)
        place = (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, states.shape[2])
        return states.gather(1, place)[:, 0].masked_fill((count == 0)[:, None], 0)

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        """Scores from the last `max_length` items (of the vocabulary); without a single one of it, the output bias.

        An empty history gets the log frequencies, or, without any, the order of the catalogue.
        """
        last = self.last_state(history, lengths)
        if self.chosen is None:
            scores = torch.addmm(self.output_bias, last, self.table.T)
        else:
            own = last @ self.table[1:].T
            scores = self.output_bias.expand(own.shape[0], -1).index_add(1, self.chosen[1:], own)
        return torch.where((lengths == 0)[:, None], self._without_history(), scores)

    def vocabulary(self) -> Tensor:
        """The items that the history scores, bool `[items + 1]`."""
        return self.places() > 0

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        """The vocabulary, and of the other items the first by their bias, and by frequency for empty histories."""
        if self.chosen is None:
            return super().candidates(best, allowed)
        inside = self.vocabulary()
        orders = (self.output_bias, self._without_history())
        rest = [first_of(order, allowed & ~inside, best) for order in orders]
        return torch.cat([(allowed & inside).nonzero()[:, 0], *rest]).unique()

    @torch.no_grad()
    def scorer(self, items: Tensor) -> Scores:
        """`forward` for some columns. Their rows of the table are copied, unless they are many: then all items are scored."""
        rows = self.places()[items]
        whole = self.chosen is None and 16 * len(items) > self.spec.items
        every = whole and torch.equal(items, torch.arange(1, self.spec.items + 1))
        table = self.table[1:] if whole else self.table[rows] * (rows > 0)[:, None]
        bias, cold = self.output_bias[1:] if whole else self.output_bias[items], self._without_history()[items]

        def scores(history: Tensor, lengths: Tensor) -> Tensor:
            made = torch.addmm(bias, self.last_state(history, lengths), table.T)
            if whole and not every:
                made = made[:, items - 1]
            made[lengths == 0] = cold
            return made

        return scores

    @torch.no_grad()
    def similar(self, item: int) -> Tensor | None:
        rows = self.places()
        if not rows[item]:
            return None
        unit = F.normalize(self.table, dim=1)
        return (unit @ unit[rows[item]])[rows].masked_fill(rows == 0, -torch.inf)

    def popularity(self) -> Tensor | None:
        return None if self.frequencies is None else _set_first(self.frequencies, 0.0)

    def trained_network(self) -> Network:
        return self

    def attention_maps(self, history: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]] | None:
        """The items attended to, `[B, L]`, and by kind of attention the matrix of each block, `[B, heads, L, L]`."""
        return None

    def check(self) -> None:
        """The vocabulary must be items of the catalogue, each once."""
        if self.chosen is not None and (
            int(self.chosen.min()) < 0
            or int(self.chosen.max()) > self.spec.items
            or len(self.chosen.unique()) < len(self.chosen)
        ):
            raise ValueError(f"the vocabulary holds items outside 1..{self.spec.items}, or one of them twice")

    def _without_history(self) -> Tensor:
        if self.frequencies is not None:
            return _set_first(self.frequencies.log(), -torch.inf)
        order = -torch.arange(self.spec.items + 1, dtype=self.output_bias.dtype, device=self.output_bias.device)
        return _set_first(order, -torch.inf)


def _table(count: int, d: int, padding_idx: int | None) -> nn.Embedding:
    table = nn.Embedding(count, d, padding_idx)
    nn.init.normal_(table.weight, std=0.02)
    return table


def _oldest_first(newest_first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The first `count` `[B]` values of each row `[B, width]` in reverse; then 0."""
    column = torch.arange(newest_first.shape[1], device=count.device)
    values = newest_first.gather(1, (count[:, None] - 1 - column).clamp_min(0))
    return torch.where(column < count[:, None], values, 0), count


def _set_first(values: Tensor, value: float) -> Tensor:
    return torch.cat([values.new_full((1,), value), values[1:]])

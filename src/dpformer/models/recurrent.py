"""GRU and LSTM layers as plain loops over `F.linear`, which the clipping recorder sees into (`nn.GRU` hides its weights).

Parameters, their names' meaning and the results are those of `torch.nn.GRU` and `torch.nn.LSTM` (one layer, batch first).
The input's part of all gates is one product for the whole sequence; only the recurrent part runs step by step.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.models.dropout import Dropout
from dpformer.models.network import Network, NetworkSpec
from dpformer.models.recommender import register


class _Recurrent(nn.Module):
    """x `[B, T, input]` to the states `[B, T, hidden]` after each step; the first starts from zeros."""

    gates: int

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        size = self.gates * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(size))
        self.bias_hh = nn.Parameter(torch.empty(size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.hidden_size)
        states = []
        for given in F.linear(x, self.weight_ih, self.bias_ih).unbind(1):
            h, c = self.step(given, F.linear(h, self.weight_hh, self.bias_hh), h, c)
            states.append(h)
        return torch.stack(states, 1) if states else x.new_zeros(*x.shape[:2], self.hidden_size)

    def step(self, given: Tensor, before: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """The next h and c, from what the input and the last h say about all gates."""
        raise NotImplementedError


class GRULayer(_Recurrent):
    """Gated recurrent unit (Cho et al. 2014).

    r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)      z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
    n = tanh(W_in x + b_in + r (W_hn h + b_hn))     h' = (1 - z) n + z h
    """

    gates = 3

    def step(self, given: Tensor, before: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        (r, z, n), (hr, hz, hn) = given.chunk(3, 1), before.chunk(3, 1)
        n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
        return torch.lerp(n, h, torch.sigmoid(z + hz)), c


class LSTMLayer(_Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber 1997).

    i, f, o = sigmoid(W x + b + U h + b'), each its own      g = tanh(W_g x + b_g + U_g h + b'_g)
    c' = f c + i g                                           h' = o tanh(c')
    """

    gates = 4

    def step(self, given: Tensor, before: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (given + before).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class RecurrentSpec(NetworkSpec):
    """A GRU or an LSTM of width d, one layer."""

    kind: Literal["gru", "lstm"]


class _RecurrentNetwork(Network):
    layer: type[_Recurrent]

    def __init__(self, spec: RecurrentSpec) -> None:
        super().__init__(spec)
        self.recurrent = self.layer(spec.d, spec.d)
        self.dropout = Dropout(spec.dropout)

    def states(self, rows: Tensor) -> Tensor:
        """Hidden states `[B, L, d]` of rows `[B, L]`, L of any size."""
        states: Tensor = self.dropout(self.recurrent(self.dropout(self.embedding(rows))))
        return states


@register("gru", RecurrentSpec)
class GRU(_RecurrentNetwork):
    """Item embeddings, a GRU, and the embeddings again as output table."""

    layer = GRULayer


@register("lstm", RecurrentSpec)
class LSTM(_RecurrentNetwork):
    """Item embeddings, an LSTM, and the embeddings again as output table."""

    layer = LSTMLayer

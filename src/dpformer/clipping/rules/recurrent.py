"""`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells, as loops over times of functions that have rules.

At time t the gates are `x_t W' + b + h_{t-1} U' + c`. The first two terms are one linear use for all times; `algebra.merge` makes
one of the uses of U and c at all times too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import register_rule

State = tuple[Tensor, ...]


def _cell(kind: str, x: Tensor, h: Tensor, state: State) -> State:
    """The next state from the gates of the input x and of the state h, each `[B, gates * n]`, as torch orders them."""
    if kind.startswith("lstm"):
        i, f, g, o = (x + h).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if kind.startswith("gru"):
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
        new = torch.tanh(xn + (xr + hr).sigmoid() * hn)
        z = (xz + hz).sigmoid()
        return ((1 - z) * new + z * state[0],)
    return (torch.tanh(x + h) if "tanh" in kind else torch.relu(x + h),)


def _layer(
    kind: str, x: Tensor, state: State, weights: Sequence[Tensor], reverse: bool, going: Tensor | None
) -> tuple[Tensor, State]:
    """One direction of one layer: x `[B, T, d]` to `[B, T, n]` and the last state. going `[B, T]`: what is no padding."""
    w, u = weights[:2]
    b, c = weights[2:4] if len(weights) > 2 and weights[2].dim() == 1 else (None, None)
    project = weights[-1] if len(weights) in (3, 5) else None
    inputs = F.linear(x, w, b)
    times, outputs = range(x.shape[1]), {}
    for t in reversed(times) if reverse else times:
        following = _cell(kind, inputs[:, t], F.linear(state[0], u, c), state)
        if project is not None:
            following = (F.linear(following[0], project), *following[1:])
        if going is not None:
            on = going[:, t, None]
            following = tuple(torch.where(on, new, old) for new, old in zip(following, state, strict=True))
        state, outputs[t] = following, following[0]
    return torch.stack([outputs[t] for t in times], 1), state


def _network(
    kind: str, x: Tensor, states: State, weights: Sequence[Tensor], settings: Sequence[Any], going: Tensor | None
) -> tuple[Tensor, State]:
    """All layers and directions. x `[B, T, d]`, states `[layers * directions, B, n]` each."""
    _, layers, dropout, training, both = settings[:5]
    directions = 2 if both else 1
    each = len(weights) // (layers * directions)
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            own, reverse = tuple(state[k] for state in states), k % directions == 1
            y, end = _layer(kind, x, own, weights[k * each : (k + 1) * each], reverse, going)
            outputs.append(y)
            last.append(end)
        x = torch.cat(outputs, -1)
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    return x, tuple(torch.stack(parts) for parts in zip(*last, strict=True))


@register_rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(recorder: Recorder, function: Any, data: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """A whole network, of padded sequences or of packed ones."""
    packed = isinstance(rest[0], Tensor) and rest[0].dtype is torch.int64 and rest[0].dim() == 1
    if packed:
        sizes, states, weights, *settings = rest
        x, lengths = pad_packed_sequence(PackedSequence(data, sizes), batch_first=True)
        going = (torch.arange(x.shape[1]) < lengths[:, None]).to(x.device)
    else:
        states, weights, *settings = rest
        x, going = data if settings[5] else data.transpose(0, 1), None
    states = (states,) if isinstance(states, Tensor) else tuple(states)
    for state in states:
        if (view := recorder.view(state)) is not None:
            raise recorder.refuse(function, view, "takes it as a state; add it to zeros for all samples")
    y, last = recorder.call(_network, function.__name__, x, states, weights, settings, going)
    if packed:
        y = pack_padded_sequence(y, lengths, batch_first=True).data
    elif not settings[5]:
        y = y.transpose(0, 1)
    return (y, *last)


@register_rule(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def cell(
    recorder: Recorder, function: Any, input: Tensor, hx: Any, w: Tensor, u: Tensor, *biases: Tensor | None
) -> Any:
    """One step of one layer."""
    state, (b, c) = (hx,) if isinstance(hx, Tensor) else tuple(hx), biases or (None, None)
    following = recorder.call(lambda: _cell(function.__name__, F.linear(input, w, b), F.linear(state[0], u, c), state))
    return following if function is torch.lstm_cell else following[0]

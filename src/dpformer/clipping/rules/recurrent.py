"""`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells: a recurrent weight is used at each time, which is one use of all times together.

At time t the gates are `x_t W' + b + h_{t-1} U' + c`. The first two terms are one linear use for all times. The loop over times
adds zeros to the third, whose gradient is that at `h_{t-1} U' + c`: so the use of U and c is one linear use of all times too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpformer.clipping.axis import Layout
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import register_rule
from dpformer.clipping.rules.linear import linear_forms
from dpformer.clipping.use import Forms

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
    recorder: Recorder,
    function: Any,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor],
    reverse: bool,
    going: Tensor | None,
) -> tuple[Tensor, State]:
    """One direction of one layer: x `[B, T, d]` to `[B, T, n]` and the last state. going `[B, T]`: what is no padding."""
    kind = function.__name__
    w, u = weights[:2]
    b, c = weights[2:4] if len(weights) > 2 and weights[2].dim() == 1 else (None, None)
    project = weights[-1] if len(weights) in (3, 5) else None
    inputs = recorder.call(F.linear, x, w, b)
    before: list[Tensor] = []  # the states that U is applied to
    views = [recorder.view(u), recorder.view(c)]

    def derive(gradient: Tensor, samples: Layout) -> Forms:
        return linear_forms(views[0], views[1], gradient, samples, torch.stack(before, 1))

    zeros = inputs.new_zeros(inputs.shape, requires_grad=False)
    added = recorder.record(function, zeros, views, derive) if any(v is not None for v in views) else zeros
    u, c = recorder.value(u), recorder.value(c)
    times, outputs = range(x.shape[1]), {}
    for t in reversed(times) if reverse else times:
        before.append(state[0].detach())
        hidden = F.linear(state[0], u, c) + added[:, t]
        following = _cell(kind, inputs[:, t], hidden, state)
        if project is not None:
            following = (recorder.call(F.linear, following[0], project), *following[1:])
        if going is not None:
            on = going[:, t, None]
            following = tuple(torch.where(on, new, old) for new, old in zip(following, state, strict=True))
        state, outputs[t] = following, following[0]
    if reverse:
        before.reverse()
    return torch.stack([outputs[t] for t in times], 1), state


def _network(
    recorder: Recorder,
    function: Any,
    x: Tensor,
    states: State,
    weights: Sequence[Tensor],
    settings: Sequence[Any],
    going: Tensor | None,
) -> tuple[Tensor, State]:
    """All layers and directions. x `[B, T, d]`, states `[layers * directions, B, n]` each."""
    _, layers, dropout, training, both = settings[:5]
    for state in states:
        if (view := recorder.view(state)) is not None:
            raise recorder.refuse(function, view, "takes it as a state; add it to zeros for all samples")
    directions = 2 if both else 1
    each = len(weights) // (layers * directions)
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            own = tuple(state[k] for state in states)
            y, end = _layer(recorder, function, x, own, weights[k * each : (k + 1) * each], direction == 1, going)
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
        going = torch.arange(x.shape[1]) < lengths[:, None]
    else:
        states, weights, *settings = rest
        x, going = data if settings[5] else data.transpose(0, 1), None
    states = (states,) if isinstance(states, Tensor) else tuple(states)
    y, last = _network(recorder, function, x, states, weights, settings, None if going is None else going.to(x.device))
    if packed:
        y = pack_padded_sequence(y, lengths, batch_first=True).data
    elif not settings[5]:
        y = y.transpose(0, 1)
    return (y, *last)


@register_rule(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def cell(
    recorder: Recorder,
    function: Any,
    input: Tensor,
    hx: Any,
    w: Tensor,
    u: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
) -> Any:
    """One step of one layer."""
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    x, h = recorder.call(F.linear, input, w, b), recorder.call(F.linear, state[0], u, c)
    following = recorder.call(_cell, function.__name__, x, h, state)
    return following if function is torch.lstm_cell else following[0]

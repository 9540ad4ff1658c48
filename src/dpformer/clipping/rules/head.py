"""`TiedCrossEntropy`: the table's use as a catalogue's output layer; its algebra is in `dpformer.clipping.tied`.

Two items with logits 0 and target 1: D = (1/2, -1/2), so with H = 4 the gradient is (2, -2):

>>> import torch
>>> from dpformer.clipping import PhantomClipping, TiedCrossEntropy
>>> head, table = TiedCrossEntropy(), torch.nn.Embedding(2, 1)
>>> _ = torch.nn.init.zeros_(table.weight)
>>> H, y, w = torch.tensor([[[4.0]]]), torch.tensor([[1]]), torch.tensor([[1.0]])
>>> PhantomClipping(table).norms(lambda: head(H, table.weight, y, w)).square().round()  # 2^2 + 2^2
tensor([8.], dtype=torch.float64)
"""

from typing import Any

from torch import Tensor

from dpformer.clipping.recorder import Recorder, register_rule
from dpformer.clipping.tied import Head
from dpformer.clipping.tied_head import HeadPass, Plain, tied_cross_entropy
from dpformer.clipping.use import Forms
from dpformer.clipping.walk import Layout


@register_rule(tied_cross_entropy)
def tied(recorder: Recorder, function: Any, hidden: Tensor, table: Tensor, *rest: Any) -> Tensor:
    """The head with a trainable table, which must be a whole parameter. rest: targets, weights, bias, workspace."""
    view = recorder.view(table)
    recorder.data(function, hidden)
    assert view is not None
    if view.value is not view.parameter:
        raise recorder.refuse(function, view, "needs the whole table; use a bias of -inf to leave items out")
    targets, weights, bias, workspace = rest
    head = HeadPass(hidden.detach(), view.parameter.detach(), targets, weights, bias, workspace, recorder.route)

    def derive(gradient: Tensor, samples: Layout, *saved: Tensor) -> Forms:
        yield view, Head(head, gradient)

    losses = Plain.apply(hidden, view.parameter.detach(), head, targets, weights)
    return recorder.record(function, losses, [view], derive, saved=[hidden, targets, weights])

"""Where attention goes, by how popular the items are: to see distraction, and what Re-Attention does about it."""

from __future__ import annotations

import torch
from torch import Tensor

from dpformer.evaluation.evaluate import SLICES
from dpformer.models import Transformer


def attention_lift(scores: Tensor, s: Tensor, groups: Tensor) -> Tensor:
    """How much attention head, torso and tail get, over what uniform attention would give them, `[3]`.

    scores `[B, heads, L, L]`, s `[B, L]` (0 after the end), groups by `popularity_classes`. 1 everywhere means attention does
    not look at popularity; a class that no history holds is not a number.

    >>> scores = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]]])  # an item of the head, then one of the torso
    >>> attention_lift(scores, torch.tensor([[1, 2]]), torch.tensor([2, 0, 1]))  # 1.25 of 1.5, 0.75 of 0.5
    tensor([0.8333, 1.5000,    nan])
    """
    L = s.shape[1]
    uniform = torch.tril(torch.ones(L, L)) / torch.arange(1, L + 1)[:, None]
    rows = (s > 0)[:, :, None].to(scores)
    received = (scores.mean(1) * rows).sum(1)
    expected = (uniform.to(scores) * rows).sum(1)
    group = groups[s]
    return torch.stack([received[group == g].sum() / expected[group == g].sum() for g in range(len(SLICES))])


def attention_shift(network: Transformer, history: Tensor) -> float:
    """How far Re-Attention moves attention: mean total variation from plain attention, over the rows of the first block.

    history `[B, L]`: item ids, 0 after the end.
    """
    items, maps = network.attention_maps(history)
    corrected, plain = (maps[name][0] for name in ("with Re-Attention", "plain attention"))
    return float(((corrected - plain).abs().sum(-1).mean(1) / 2)[items > 0].mean())

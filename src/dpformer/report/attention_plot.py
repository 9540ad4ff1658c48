"""Where attention goes, by how popular the items are: to see distraction, and what Re-Attention does about it."""

from __future__ import annotations

import torch
from torch import Tensor

from dpformer.models import Transformer


def popularity_groups(frequencies: Tensor, shares: tuple[float, ...] = (0.5, 0.3, 0.2)) -> Tensor:
    """Items `[items + 1]` by popularity: group 0 holds the most popular ones that make up the first share of all occurrences
    (the head), and so on; row 0 (padding) is in group -1.

    >>> popularity_groups(torch.tensor([0.0, 0.1, 0.6, 0.3]), (0.5, 0.5))
    tensor([-1,  1,  0,  1])
    """
    order = frequencies[1:].argsort(descending=True, stable=True) + 1
    before = frequencies[order].cumsum(0) - frequencies[order]  # the share of all more popular items
    edges = torch.tensor(shares).cumsum(0)[:-1] * frequencies[1:].sum()
    groups = torch.full((len(frequencies),), -1)
    groups[order] = torch.bucketize(before, edges.to(before), right=True)
    return groups


def attention_lift(scores: Tensor, s: Tensor, groups: Tensor) -> Tensor:
    """How much attention the keys of each group get, over what uniform attention would give them: `[groups]`.

    scores `[B, heads, L, L]`, s `[B, L]` (0 after the end). 1 everywhere means attention does not look at popularity.

    >>> scores = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]]])  # item 1 of group 0, then item 2 of group 1
    >>> attention_lift(scores, torch.tensor([[1, 2]]), torch.tensor([-1, 0, 1]))  # 1.25 of 1.5, 0.75 of 0.5
    tensor([0.8333, 1.5000])
    """
    L = s.shape[1]
    real = s > 0
    uniform = torch.tril(torch.ones(L, L)) / torch.arange(1, L + 1)[:, None]
    rows = real[:, :, None].to(scores)
    received = (scores.mean(1) * rows).sum(1)
    expected = (uniform.to(scores) * rows).sum(1)
    group = groups[s]
    return torch.stack([received[group == g].sum() / expected[group == g].sum() for g in range(int(groups.max()) + 1)])


def attention_shift(network: Transformer, history: Tensor) -> float:
    """How far Re-Attention moves attention: mean total variation from plain attention, over the rows of the first block.

    history `[B, L]`: item ids, 0 after the end.
    """
    items, maps = network.attention_maps(history)
    corrected, plain = (maps[name][0] for name in ("with Re-Attention", "plain attention"))
    return float(((corrected - plain).abs().sum(-1).mean(1) / 2)[items > 0].mean())

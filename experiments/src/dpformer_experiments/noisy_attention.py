"""How much of what noise costs a trained network can be won back in its attention.

The rows of the embedding get noise whose variances are known. Then three kinds of attention are compared, on the same noise:

    as it is      scores of noisy queries and keys
    corrected     Re-Attention with the true variances, which in training are only estimated
    clean         the scores of the network without noise, all else noisy: what correcting the scores could reach at best
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.data import Dataset, HeldOut, held_out
from dpformer.evaluation import evaluate
from dpformer.models import Transformer
from dpformer.models.transformer import Block

AS_IT_IS, CORRECTED, CLEAN = "as it is", "corrected", "clean"
KINDS = (AS_IT_IS, CORRECTED, CLEAN)
# Mean variance of the noise over that of the embedding, and how often noise is drawn.
LEVELS, DRAWS = (0.1, 0.3, 1.0), 5
# Rare items have more noise, up to 5.6 times the variance, as the accumulated noise of a trained embedding has
# (docs/reattention.md): p^-1/4, with p of at least a thousandth of the largest.
POWER, RAREST = -0.25, 1e-3
USERS = 3000


def measure(network: Transformer, dataset: Dataset, draws: int = DRAWS, users: int = USERS) -> dict[str, Any]:
    """NDCG@10 in % on the validation item: without noise, and by level and kind of attention, one value for each draw."""
    held, items = held_out(dataset.sequences, "validation"), len(dataset.catalogue)
    matrix = network.embedding.weight
    clean = matrix.detach().clone()
    shape = row_variances(held, items) * float(clean[1:].square().mean())

    def figure() -> float:
        return round(100 * evaluate(network, held, items, sample=users).masked["ndcg@10"].value, 4)

    result: dict[str, Any] = {"without noise": figure(), "noisy": []}
    try:
        for level in LEVELS:
            row: dict[str, Any] = {"level": level, **{kind: [] for kind in KINDS}}
            for draw in range(draws):
                noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(draw))
                with torch.no_grad():
                    matrix.copy_(clean + noise * (level * shape).sqrt()[:, None])
                row[AS_IT_IS].append(figure())
                with known_variances(network, level * shape):
                    row[CORRECTED].append(figure())
                with attention_of(network, clean):
                    row[CLEAN].append(figure())
            result["noisy"].append(row)
    finally:
        with torch.no_grad():
            matrix.copy_(clean)
    return result


def row_variances(held: HeldOut, items: int) -> Tensor:
    """Variances by item, `[items + 1]`, whose mean over all events is 1; 0 for the padding."""
    counts = np.bincount(held.histories.items, minlength=items + 1).astype(float)
    p = np.maximum(counts / counts.max(), RAREST)
    p[0] = np.inf
    variances = p**POWER
    return torch.from_numpy(variances * counts.sum() / (variances * counts).sum()).float()


@contextmanager
def known_variances(network: Transformer, variances: Tensor) -> Iterator[None]:
    """Attention is corrected for noise of these variances on the rows of the embedding, and for no other."""
    network.var_items.copy_(variances)
    network.var_blocks.fill_(1e-20)  # above 0: there is noise
    try:
        yield
    finally:
        network.var_items.zero_()
        network.var_blocks.zero_()


@contextmanager
def attention_of(network: Transformer, clean: Tensor) -> Iterator[None]:
    """The attention scores are those that the network has with the embedding `clean`."""
    usual: Callable[[Tensor], Tensor] = network.states

    def states(rows: Tensor) -> Tensor:
        noisy = network.embedding.weight.detach().clone()
        with torch.no_grad():
            network.embedding.weight.copy_(clean)
            scores = network.attention(rows)
            network.embedding.weight.copy_(noisy)
            return states_with(network, rows, scores)

    network.states = states  # type: ignore[method-assign]
    try:
        yield
    finally:
        del network.states
    assert network.states == usual


def states_with(network: Transformer, rows: Tensor, scores: Sequence[Tensor]) -> Tensor:
    """`Transformer.states`, without dropout, with these attention scores `[B, heads, L, L]` of its blocks."""
    x = network.embedding(rows)
    if network.positions is not None:
        x = x + network.positions[: rows.shape[1]]
    for block, S in zip(network.blocks, scores, strict=True):
        assert isinstance(block, Block)
        h = block.norm1(x) if block.pre else x
        x = x + block.o(block._join(S @ block._split(block.qkv(h))[:, :, 2]))
        x = x if block.pre else block.norm1(x)
        x = x + block._feed(block.norm2(x) if block.pre else x, None, torch.zeros(()))[0]
        x = x if block.pre else block.norm2(x)
    states: Tensor = network.norm(x)
    return states

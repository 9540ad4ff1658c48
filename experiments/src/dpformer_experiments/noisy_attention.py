"""How much of what noise costs a trained network can be won back in its attention, and what its learned scores are worth.

`measure`: the rows of an embedding that was trained without noise get noise whose variances v are known. Then kinds of attention
are compared, on the same noise:

    as it is      scores of noisy queries and keys
    corrected     Re-Attention with the true variances, which in training are only estimated
    by key        keys by their reliability r = t / (t + v), with t the mean square of the embedding: the posterior mean of a
                  row under a normal prior. Layer norm takes the length off a row, so where it comes first it is sqrt(r)
    even          the mean of these factors for all keys: what is won by flatter attention alone
    clean         the scores of the network without noise, all else noisy: what correcting the scores could reach at best

`measure_scales`: in a network trained by DP-SGD, learned scores times several factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.data import Dataset, HeldOut, held_out
from dpformer.evaluation import evaluate
from dpformer.models import Transformer
from dpformer.models.attention import kernel
from dpformer.models.transformer import Block

AS_IT_IS, CORRECTED, BY_KEY, EVEN, CLEAN = "as it is", "corrected", "by key", "even", "clean"
KINDS = (AS_IT_IS, CORRECTED, BY_KEY, EVEN, CLEAN)
# Factors on learned scores: none of what was learned, half, all, and more.
SCALES = (0.0, 0.5, 1.0, 1.5, 2.0)
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
    square = float(clean[1:].square().mean())
    shape, events = row_variances(held, items) * square, event_shares(held, items)
    power = 0.5 if network.spec.norm == "pre" else 1.0

    def figure() -> float:
        return ndcg(network, held, items, users)

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
                by_key = (square / (square + level * shape)) ** power
                for kind, factors in ((BY_KEY, by_key), (EVEN, by_key.mul(events).sum().expand_as(by_key))):
                    with keys_times(network, factors):
                        row[kind].append(figure())
                with attention_of(network, clean):
                    row[CLEAN].append(figure())
            result["noisy"].append(row)
    finally:
        with torch.no_grad():
            matrix.copy_(clean)
    return result


def measure_scales(network: Transformer, dataset: Dataset, users: int = USERS) -> dict[str, float]:
    """NDCG@10 in % on the validation item, by factor on the learned scores; where keys fall off with the lag, that stays."""
    held, items = held_out(dataset.sequences, "validation"), len(dataset.catalogue)
    found = {}
    for scale in SCALES:
        with keys_times(network, torch.full((len(network.embedding.weight),), scale)):
            found[f"{scale:g}"] = ndcg(network, held, items, users)
    return found


def ndcg(network: Transformer, held: HeldOut, items: int, users: int) -> float:
    """NDCG@10 in %, of so many users."""
    return round(100 * evaluate(network, held, items, sample=users).masked["ndcg@10"].value, 4)


def event_shares(held: HeldOut, items: int) -> Tensor:
    """Each item's share of all events, `[items + 1]`."""
    counts = torch.from_numpy(np.bincount(held.histories.items, minlength=items + 1)).float()
    counts[0] = 0
    return counts / counts.sum()


def row_variances(held: HeldOut, items: int) -> Tensor:
    """Variances by item, `[items + 1]`, whose mean over all events is 1; 0 for the padding."""
    shares = event_shares(held, items)
    p = (shares / shares.max()).clamp_min(RAREST)
    p[0] = torch.inf
    variances = p**POWER
    return variances / (variances * shares).sum()


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

    def states(rows: Tensor) -> Tensor:
        noisy = network.embedding.weight.detach().clone()
        with torch.no_grad():
            network.embedding.weight.copy_(clean)
            scores = network.attention(rows)
            network.embedding.weight.copy_(noisy)
            return states_by(network, rows, lambda n, q, k, v: scores[n] @ v)

    with _with_states(network, states):
        yield


@contextmanager
def keys_times(network: Transformer, factors: Tensor) -> Iterator[None]:
    """Keys are multiplied by the factors `[rows]` of their tokens, so that their scores are."""

    def states(rows: Tensor) -> Tensor:
        bias, of_tokens = network._bias(rows), factors[rows][:, None, :, None]
        with torch.no_grad():
            return states_by(network, rows, lambda n, q, k, v: kernel(q, k * of_tokens, v, bias))

    with _with_states(network, states):
        yield


@contextmanager
def _with_states(network: Transformer, states: Callable[[Tensor], Tensor]) -> Iterator[None]:
    usual: Callable[[Tensor], Tensor] = network.states
    network.states = states  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del network.states
    assert network.states == usual


def states_by(network: Transformer, rows: Tensor, mix: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """`Transformer.states`, without dropout, with `mix` of block n, queries, keys and values for its attention."""
    x = network.embedding(rows)
    if network.positions is not None:
        x = x + network.positions[: rows.shape[1]]
    for n, block in enumerate(network.blocks):
        assert isinstance(block, Block)
        h = block.norm1(x) if block.pre else x
        x = x + block.o(block._join(mix(n, *block._split(block.qkv(h)).unbind(2))))
        x = x if block.pre else block.norm1(x)
        x = x + block._feed(block.norm2(x) if block.pre else x, None, torch.zeros(()))[0]
        x = x if block.pre else block.norm2(x)
    states: Tensor = network.norm(x)
    return states

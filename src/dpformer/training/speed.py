"""Roughly how long a training takes and how much memory it needs, from its arithmetic and this machine's speed."""

import time
from dataclasses import dataclass

TILE = 256
MICRO_BATCH = 8192
"""Tokens in a micro-batch, and rows of logits kept at once: the assumptions behind the memory figure."""


@dataclass(frozen=True)
class Work:
    """The arithmetic of a Transformer with a tied full-catalogue head, feed-forward width 4 d.

    One training step on n tokens multiplies and adds 6 times for each of them and each weight it meets (2 forward, 4
    backward): 6 n M d in the head, 6 n 12 d^2 in each block, and 12 n L d in each block's attention of length L.
    """

    items: int
    tokens: float
    length: float
    dim: int
    blocks: int

    @property
    def flops(self) -> float:
        """Floating-point operations of one step."""
        per_block = 6 * 12 * self.dim**2 + 12 * self.length * self.dim
        return self.tokens * (6 * self.items * self.dim + self.blocks * per_block)

    @property
    def parameters(self) -> int:
        """Weights: the item table, positions, blocks."""
        return int(self.items * self.dim + self.length * self.dim + self.blocks * 12 * self.dim**2)

    @property
    def memory_mb(self) -> float:
        """Weights, gradient, two Adam moments and noise; one tile of logits and its gradient; one micro-batch."""
        micro = min(self.tokens, MICRO_BATCH) * self.dim * (16 * self.blocks + 4)
        return 4 * (5 * self.parameters + 2 * TILE * self.items + self.items * self.dim + micro) / 2**20


def gemm_speed(items: int, dim: int, seconds: float = 0.4) -> float:
    """Floating-point operations a second of a float32 matrix product shaped like the head's, measured now.

    The fastest of many is taken: what else the machine does at the moment is not part of the estimate. A product of a
    small catalogue would time the waking of threads rather than arithmetic, so it has 4,096 columns at least.
    """
    import torch

    items = max(items, 4096)
    left, right = torch.randn(TILE, dim), torch.randn(dim, items)
    result = torch.empty(TILE, items)
    fastest, start = float("inf"), time.perf_counter()
    while (before := time.perf_counter()) - start < seconds:
        torch.mm(left, right, out=result)
        fastest = min(fastest, time.perf_counter() - before)
    return 2 * TILE * items * dim / fastest

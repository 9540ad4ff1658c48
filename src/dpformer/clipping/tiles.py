"""How the tokens of a batch are cut into tiles for the head, and what is kept of the tiles between its two passes.

D `[tokens, M]` is needed twice: for the gradient at H, and later for the norm and the sum of the gradient at the table E. In
between D is kept if the batch is small enough (`HOLD_ELEMENTS`), else it is computed again. Of a long sample the gradient at E
itself, `[d, M]`, is smaller than its D, `[T, M]`: under clipping it is formed while D is in the processor's cache, and kept.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dpformer.clipping.gradient import Route
from dpformer.clipping.workspace import Workspace

# Tokens in a tile of logits: few enough for a processor's own cache, enough for matrix products to run at full speed.
TILE_TOKENS = 64
# Elements of D that are clipped at a time, in whole samples.
GROUP_ELEMENTS = 2**22
# Rows of D begin at multiples of so many numbers: kernels round another way where memory is not aligned, so a sample that
# leaves would change the rounding of the others.
ALIGNED = 16
# The most that is kept of D from the forward to the clipping pass: 200 MB of float32.
HOLD_ELEMENTS = 3 * 2**24


@dataclass(frozen=True)
class Tile:
    """Some samples' tokens: H `[b, T, d]`, with all factors of a token, and D `[b, T, M]`; `D'H` is the gradient at E.

    A sample too long for one tile comes in several: `first` to `last`. `at`: the place of its first sample in `Tiling.order`.
    """

    H: Tensor
    D: Tensor
    first: bool
    last: bool
    at: int


@dataclass(frozen=True)
class Group:
    """`size` samples padded to T tokens, from place `at` in `Tiling.order`; their tokens follow each other from `start`.

    kept: their gradients at E are kept, and not their D.
    """

    size: int
    T: int
    start: int
    at: int
    kept: bool


def by_pairs(T: int, d: int, route: Route | None) -> bool:
    """Whether samples of T tokens are measured by pairs of tokens, if they can be, or else by their gradients at E.

    Pairs need D D', T products per element of D; gradients, passes over d / T elements for it, which cost about 18 products.
    """
    return 18 * d > T**2 if route is None else route == "gram"


def row_budget(items: int, token_budget: int) -> int:
    """How many rows `[items]`, of D or of gradients at E, micro-batches of so many tokens may keep."""
    return min(3 * token_budget // 8, max(TILE_TOKENS, HOLD_ELEMENTS // max(1, items)))


class Tiling:
    """Weighted tokens of a batch in the order of their groups; weights `[B, L]`, for a table `[M, d]`.

    order, empty: samples in the order of the groups, and those without a weighted token. owners, padding `[tokens]`: each
    token's sample, and whether the token fills up its sample to the length of its group.
    """

    def __init__(self, weights: Tensor, M: int, d: int, route: Route | None) -> None:
        self.shape = weights.shape
        self.most = max(TILE_TOKENS, GROUP_ELEMENTS // M)  # tokens of a group of several samples, and of a tile
        used = weights != 0
        counts = used.sum(1)
        lengths = counts.tolist()
        # Samples often come by length: then nothing has to be put in order.
        self.ordered = all(a >= b > 0 for a, b in pairwise((*lengths, *lengths[-1:])))
        order = torch.arange(len(weights), device=counts.device)
        if not self.ordered:
            order = torch.argsort(counts, descending=True, stable=True)
            lengths = counts[order].tolist()
        self.groups = _groups(lengths, self.most, d, route)
        ends = [(group.at + group.size, group.start + group.size * group.T) for group in self.groups]
        last, tokens = ends[-1] if ends else (0, 0)
        self.order, self.empty = order[:last], order[last:]
        widths = [group.T for group in self.groups for _ in range(group.size)]
        width = torch.tensor(widths, dtype=order.dtype, device=order.device)
        self.owners = self.order.repeat_interleave(width, output_size=tokens)
        # Each token's number in its sample: weighted ones are in front, what comes after them is padding.
        first = (width.cumsum(0) - width).repeat_interleave(width, output_size=tokens)
        column = torch.arange(tokens, device=order.device) - first
        self.padding = column >= counts[self.owners]
        # Where tokens are in the flattened [B * L]; None if all are, in order.
        self.positions: Tensor | None = None
        if not self.ordered or tokens != weights.numel() or bool(self.padding.any()):
            # Padding stands for its sample's first token.
            begin = counts.cumsum(0) - counts
            column = begin[self.owners] + column.masked_fill(self.padding, 0)
            self.positions = used.flatten().nonzero()[:, 0][column]

    def take(self, x: Tensor) -> Tensor:
        """Tokens `[tokens, ...]` of x `[B, L, ...]`; 0 at padding, whatever stands there."""
        x = x.flatten(0, 1)
        if self.positions is None:
            return x
        return x[self.positions].masked_fill_(self.padding.view(-1, *(1,) * (x.dim() - 1)), 0)

    def put(self, x: Tensor) -> Tensor:
        """The inverse of `take`: `[B, L, d]` of x `[tokens, d]`, 0 for tokens without weight."""
        if self.positions is not None:
            # Padding repeats a position, with value 0: so these are added, not written.
            x = x.new_zeros(self.shape.numel(), x.shape[1]).index_add_(0, self.positions, x)
        return x.view(*self.shape, x.shape[1])

    def per_sample(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Sums of tokens' values, each `[tokens]`, over the tokens of each sample, each `[B]`."""
        sums = values[0].new_zeros(self.shape[0], len(values))
        sums.index_add_(0, self.owners, torch.stack(values, 1).masked_fill(self.padding[:, None], 0))
        return tuple(part.clone() for part in sums.unbind(1))


def padded(T: int) -> int:
    """The length that a sample of T tokens is filled up to: at most an eighth more, and the same whatever else is in the batch.

    >>> [padded(T) for T in (7, 15, 16, 17, 33, 200)]
    [7, 15, 16, 18, 36, 208]
    """
    step = 1 << max(0, T.bit_length() - 4)
    return -(-T // step) * step


def _groups(lengths: list[int], most: int, d: int, route: Route | None) -> list[Group]:
    """Cut samples, by descending length, into groups of one padded length and of at most so many tokens.

    A sample's shape depends on its own length alone, so that one that leaves does not change how the others are rounded.
    """
    groups: list[Group] = []
    kept = [d <= T and not by_pairs(T, d, route) for T in lengths]
    widths = [T if alone else padded(T) for T, alone in zip(lengths, kept, strict=True)]
    start, k = 0, 0
    while k < len(lengths) and lengths[k] > 0:
        T = widths[k]
        n, end = 1, min(len(lengths), k + max(1, most // T))
        while k + n < end and (widths[k + n], kept[k + n]) == (T, kept[k]):
            n += 1
        groups.append(Group(n, T, start, k, kept[k]))
        start += n * T
        k += n
    return groups


class Kept:
    """The memory of one pass, until another takes it: gradients at E of kept samples, the first, then D of all other tokens."""

    def __init__(self, tiling: Tiling, table: Tensor, tokens: int, workspace: Workspace) -> None:
        self.tiling, self.workspace = tiling, workspace
        long = [group for group in tiling.groups if group.kept]
        M, d = table.shape
        self.long = sum(group.size * group.T for group in long)  # tokens of kept samples
        rows = sum(group.size for group in long) * d
        if (rows + tokens - self.long) * M <= HOLD_ELEMENTS:
            self._G = workspace.take("held gradients", rows, M, table).view(-1, d, M)
            self._D = workspace.take("held", tokens - self.long, -(-M // ALIGNED) * ALIGNED, table)[:, :M]
            workspace.held_by = self

    def rows(self, places: slice) -> Tensor | None:
        """D of some tokens `[tokens, M]`, if it is kept."""
        at = places.start - self.long
        return self._D[at : places.stop - self.long] if self.workspace.held_by is self and at >= 0 else None

    def gradients(self, group: Group) -> Tensor | None:
        """Gradients at E of a group's samples, `[size, d, M]`, transposed, if they are kept."""
        own = group.kept and self.workspace.held_by is self
        return self._G[group.at : group.at + group.size] if own else None

    def all_gradients(self) -> Tensor | None:
        """Gradients at E of all kept samples, `[samples, d, M]`, transposed; None if there are none."""
        return self._G if self.workspace.held_by is self and len(self._G) else None

    def release(self) -> None:
        """From now on D is computed again: what was kept was written over."""
        self.workspace.held_by = None

    def cut(self, tokens: int) -> list[tuple[slice, Tensor | None, bool]]:
        """The tokens of tiles, in order; for a kept sample, the memory of its gradient at E, and whether they are its first."""
        tiles: list[tuple[slice, Tensor | None, bool]] = []
        most = self.tiling.most
        for group in self.tiling.groups:
            gradients = self.gradients(group)
            for k, G in enumerate(() if gradients is None else gradients.unbind()):
                at = group.start + k * group.T
                tiles += [(slice(at + t, at + min(t + most, group.T)), G, t == 0) for t in range(0, group.T, most)]
        start = tiles[-1][0].stop if tiles else 0
        tiles += [(slice(t, min(t + TILE_TOKENS, tokens)), None, True) for t in range(start, tokens, TILE_TOKENS)]
        return tiles

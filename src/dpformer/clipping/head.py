"""Cross-entropy over the whole catalogue with a (shared) table as output layer, a tile of tokens at a time.

For tokens t with hidden state H_t, target y_t and weight w_t, and the table E `[M, d]` with a fixed bias b:

    z_t = E H_t + b      loss = sum_t w_t (logsumexp z_t - z_t[y_t])      D_t = w_t (softmax z_t - onehot y_t)
    gradient at H: D E                                                    gradient at E, for sample i: D_i' H_i

Logits and D exist for one tile at a time in memory that is used again. D is needed twice, for the gradient at H and, when
that has gone through the network, for the norm and the sum of the gradient at E. It is kept in between if the batch is
small enough (`HOLD_ELEMENTS`), else computed again; never more than that is held, whatever batch, length and catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from dpformer.errors import ClippingError

# A tile of logits: about 8 MB of float32, but never fewer tokens than make a matrix product worth its while.
TILE_ELEMENTS = 2**21
TILE_TOKENS = 64
# The most that is kept of D from the forward to the clipping pass: 128 MB of float32.
HOLD_ELEMENTS = 2**25


class TiedCrossEntropy(nn.Module):
    """`losses = head(hidden, table, targets, weights, bias)`: one loss per sample, exact, over the whole table.

    hidden `[B, L, d]`, table `[M, d]` (the input embedding, if it is shared), targets `[B, L]`; weights `[B, L]`, not
    negative, 0 for padding; bias `[M]`, fixed (-inf takes an item out of the softmax). Returns losses `[B]`.
    Works under plain autograd and under Phantom Clipping; it has no parameters of its own, only reused memory.

    >>> head = TiedCrossEntropy()
    >>> hidden, table = torch.ones(1, 2, 3), torch.zeros(4, 3)  # all logits 0: each loss is log 4
    >>> head(hidden, table, torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]))
    tensor([1.3863])
    """

    def __init__(self) -> None:
        super().__init__()
        self._workspace = Workspace()

    def forward(
        self, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See the class."""
        if hidden.dim() != 3 or targets.shape != hidden.shape[:2] or weights.shape != targets.shape:
            raise ClippingError(
                f"wanted hidden [B, L, d], targets and weights [B, L]; got {tuple(hidden.shape)}, {tuple(targets.shape)}, "
                f"{tuple(weights.shape)}"
            )
        if bias is not None and bias.requires_grad:
            raise ClippingError("the output bias of TiedCrossEntropy is fixed; detach it")
        if bool((weights < 0).any()):
            raise ClippingError("a weight of TiedCrossEntropy is negative; weights are 0 for padding, else positive")
        return tied_cross_entropy(hidden, table, targets, weights, bias, self._workspace)


def tied_cross_entropy(
    hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None, workspace: Workspace
) -> Tensor:
    """The function behind `TiedCrossEntropy`; a tape replaces it by its rule."""
    if has_torch_function((hidden, table)):
        arguments = (hidden, table, targets, weights, bias, workspace)
        return handle_torch_function(tied_cross_entropy, (hidden, table), *arguments)
    head = HeadPass(hidden.detach(), table.detach(), targets, weights, bias, workspace)
    return _Plain.apply(hidden, table, head)


class Workspace:
    """Memory for tiles, made once and used again: fresh memory of this size costs more than the arithmetic on it."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self.held_by: object = None

    def take(self, name: str, rows: int, cols: int, like: Tensor) -> Tensor:
        """Uninitialised `[rows, cols]`, valid until the same name is taken again."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < rows * cols or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory[name] = torch.empty(rows * cols, dtype=like.dtype, device=like.device)
        return memory[: rows * cols].view(rows, cols)


@dataclass(frozen=True)
class Tile:
    """Some samples' tokens: H `[b, T, d]`, D `[b, T, M]`. A sample too long for one tile comes in several."""

    samples: Tensor
    H: Tensor
    D: Tensor
    first: bool
    last: bool

    @property
    def whole(self) -> bool:
        """Whether all tokens of its samples are here."""
        return self.first and self.last


@dataclass(frozen=True)
class _Group:
    """Samples of similar length, their weighted positions moved to the front."""

    samples: Tensor  # [b]
    positions: Tensor  # [b, T], in the flattened [B * L]
    weights: Tensor  # [b, T], 0 where a sample is shorter
    start: int  # of its tokens among all groups'


class HeadPass:
    """One evaluation of the head: its losses, the gradient at H, and D again for those who need it later."""

    def __init__(
        self, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None, workspace: Workspace
    ) -> None:
        self.shape = hidden.shape
        self.H = hidden.reshape(-1, hidden.shape[-1]).to(table.dtype)
        self.E = table
        self.bias = bias
        self.targets = targets.reshape(-1)
        self.workspace = workspace
        self.tile = max(TILE_TOKENS, TILE_ELEMENTS // len(table))
        self.groups = self._make_groups(weights.to(table.dtype))
        tokens = sum(group.positions.numel() for group in self.groups)
        self.held: Tensor | None = None
        if tokens * len(table) <= HOLD_ELEMENTS:
            self.held = workspace.take("held", tokens, len(table), self.H)
            workspace.held_by = self
        self.lse = self.H.new_zeros(tokens)
        # Sum of the norms of the terms of each sample's gradient at E, [B]: see `Clip`.
        self.bound = self.H.new_zeros(self.shape[0])
        self.losses, self.gradient = self._forward()

    def tiles(self) -> Iterator[Tile]:
        """All samples with at least one weighted token, D and all."""
        for group in self.groups:
            b, T = group.positions.shape
            step = T if b * T <= self.tile else self.tile
            for t in range(0, T, step):
                part = slice(t, min(t + step, T))
                H = self._hidden(group, part)
                D = self._again(group, part, H.flatten(0, 1))
                yield Tile(group.samples, H, D.view(b, -1, D.shape[1]), first=t == 0, last=part.stop == T)

    def _make_groups(self, weights: Tensor) -> list[_Group]:
        B, L = weights.shape
        used = weights != 0
        counts = used.sum(1)
        order = torch.argsort(counts, descending=True, stable=True)
        front = torch.argsort((~used).to(torch.uint8), dim=1, stable=True)
        lengths = counts[order].tolist()
        groups, start, k = [], 0, 0
        while k < B and lengths[k] > 0:
            T = lengths[k]
            n = max(1, self.tile // T)
            while n > 1 and (k + n > B or lengths[min(k + n, B) - 1] == 0):
                n -= 1
            # Much shorter samples go to a tile of their own rather than be padded.
            while n > 1 and 2 * lengths[k + n - 1] < T:
                n -= 1
            samples = order[k : k + n]
            columns = front[samples, :T]
            groups.append(_Group(samples, samples[:, None] * L + columns, weights[samples].gather(1, columns), start))
            start += n * T
            k += n
        self.empty = order[k:]  # samples without a single weighted token
        return groups

    def _forward(self) -> tuple[Tensor, Tensor]:
        losses = self.H.new_zeros(self.shape[0])
        gradient = torch.zeros_like(self.H)
        for group in self.groups:
            b, T = group.positions.shape
            step = T if b * T <= self.tile else self.tile
            for t in range(0, T, step):
                columns = slice(t, min(t + step, T))
                positions, w = group.positions[:, columns].flatten(), group.weights[:, columns].flatten()
                places = self._places(group, columns)
                H, y = self._hidden(group, columns).flatten(0, 1), self._targets(positions, w)
                z = self._logits(H, places)
                top = z.amax(1, keepdim=True)
                hit = z.gather(1, y[:, None])
                total = z.sub_(top).exp_().sum(1, keepdim=True)
                lse = total.log() + top
                loss = (lse - hit)[:, 0]
                # softmax z * w, then minus w at the target
                z.mul_(w[:, None] / total)
                z[torch.arange(len(y), device=y.device), y] -= w
                # Padding repeats a position with weight 0, so these are added, not written.
                gradient.index_add_(0, positions, z @ self.E)
                self.lse[places] = lse[:, 0]
                samples = group.samples.repeat_interleave(len(y) // b)
                losses.index_add_(0, samples, torch.where(w > 0, w * loss, 0.0))
                # |D_t| <= sqrt(2) w (1 - p_y): the other probabilities are at most 1 - p_y together.
                size = (2**0.5) * w * (1 - torch.exp(-loss)) * torch.linalg.vector_norm(H, dim=1)
                self.bound.index_add_(0, samples, torch.where(w > 0, size, 0.0))
        return losses, gradient.view(self.shape)

    def _hidden(self, group: _Group, columns: slice) -> Tensor:
        """H `[b, t, d]` of some of a group's tokens; 0 without weight: what stands at padding must not matter."""
        return self.H[group.positions[:, columns]].masked_fill(group.weights[:, columns, None] == 0, 0)

    def _targets(self, positions: Tensor, w: Tensor) -> Tensor:
        return torch.where(w == 0, 0, self.targets[positions])

    def _places(self, group: _Group, columns: slice) -> slice:
        """Where a group's tokens lie among all; whole groups, or a part of one that holds a single sample."""
        b = len(group.samples)
        return slice(group.start + b * columns.start, group.start + b * columns.stop)

    def _logits(self, H: Tensor, places: slice) -> Tensor:
        z = self.held[places] if self.held is not None else self.workspace.take("tile", len(H), len(self.E), H)
        if self.bias is None:
            return torch.mm(H, self.E.T, out=z)
        return torch.addmm(self.bias.to(H.dtype), H, self.E.T, out=z)

    def _again(self, group: _Group, columns: slice, H: Tensor) -> Tensor:
        places = self._places(group, columns)
        if self.held is not None and self.workspace.held_by is self:
            return self.held[places]
        positions, w = group.positions[:, columns].flatten(), group.weights[:, columns].flatten()
        z = self.workspace.take("tile", len(H), len(self.E), H)
        shift = w.log() - self.lse[places]  # w softmax z = exp(z + log w - lse)
        if self.bias is None:
            torch.addmm(shift[:, None], H, self.E.T, out=z)
        else:
            torch.addmm(self.bias.to(H.dtype), H, self.E.T, out=z).add_(shift[:, None])
        z.exp_()
        y = self._targets(positions, w)
        z[torch.arange(len(y), device=y.device), y] -= w
        return z


class _Plain(torch.autograd.Function):
    """The head under plain autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, head: HeadPass) -> Tensor:
        ctx.head = head
        return head.losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        head: HeadPass = ctx.head
        at_hidden = head.gradient * upstream[:, None, None] if ctx.needs_input_grad[0] else None
        at_table = None
        if ctx.needs_input_grad[1]:
            at_table = torch.zeros_like(head.E)
            for tile in head.tiles():
                H = tile.H * upstream[tile.samples, None, None]
                at_table.addmm_(tile.D.flatten(0, 1).T, H.flatten(0, 1))
        return at_hidden, at_table, None

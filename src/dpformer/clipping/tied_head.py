"""Cross-entropy over the whole catalogue with a (shared) table as output layer, a tile of tokens at a time.

For tokens t with hidden state H_t, target y_t and weight w_t, and the table E `[M, d]` with a fixed bias b:

    z_t = E H_t + b      loss = sum_t w_t (logsumexp z_t - z_t[y_t])      D_t = w_t (softmax z_t - onehot y_t)
    gradient at H: D E                                                    gradient at E, for sample i: D_i' H_i

Logits and D exist for one tile at a time in memory that is used again. D is needed twice, for the gradient at H and, when
that has gone through the network, for the norm and the sum of the gradient at E. It is kept in between if the batch is
small enough (`HOLD_ELEMENTS`), else computed again; never more than that is held, whatever batch and length. Of a long sample
the gradient at E itself, `[d, M]`, is less than its D, `[T, M]`: under clipping, where its norm is wanted, it is formed while D
is in the processor's cache, and kept in place of D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from dpformer.clipping.gradient import Route
from dpformer.clipping.workspace import Workspace
from dpformer.errors import ClippingError

# Tokens in a tile of logits. So many keep a tile of a few thousand items in a processor's own cache, and are enough for the
# matrix products to run at full speed.
TILE_TOKENS = 64
# Tokens that are clipped together: in whole samples, as many as make some MB of D.
GROUP_ELEMENTS = 2**22
# The most that is kept of D from the forward to the clipping pass: 200 MB of float32.
HOLD_ELEMENTS = 3 * 2**24
# Logits between -LIMIT and LIMIT need no shift: exponentials, their sum over a million items and its square are all in range.
LIMIT = 20.0


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
        self.check(hidden, targets, weights, bias)
        return tied_cross_entropy(hidden, table, targets, weights, bias, self._workspace)

    @staticmethod
    def check(hidden: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None) -> None:
        """An error if shapes do not fit, the bias is trained or a weight is negative."""
        if hidden.dim() != 3 or targets.shape != hidden.shape[:2] or weights.shape != targets.shape:
            raise ClippingError(
                f"wanted hidden [B, L, d], targets and weights [B, L]; got {tuple(hidden.shape)}, {tuple(targets.shape)}, "
                f"{tuple(weights.shape)}"
            )
        if bias is not None and bias.requires_grad:
            raise ClippingError("the output bias of TiedCrossEntropy is fixed; detach it")
        if bool((weights < 0).any()):
            raise ClippingError("a weight of TiedCrossEntropy is negative; weights are 0 for padding, else positive")


def tied_cross_entropy(
    hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None, workspace: Workspace
) -> Tensor:
    """The function behind `TiedCrossEntropy`; a tape replaces it by its rule."""
    if has_torch_function((hidden, table)):
        arguments = (hidden, table, targets, weights, bias, workspace)
        return handle_torch_function(tied_cross_entropy, (hidden, table), *arguments)
    head = HeadPass(hidden.detach(), table.detach(), targets, weights, bias, workspace)
    return Plain.apply(hidden, table, head, targets, weights)


@dataclass(frozen=True)
class Tile:
    """Some samples' tokens: H `[b, T, d]` and D `[b, T, M]`, of which `D'H` is the gradient at E.

    A factor that belongs to a token, such as its weight, is in its row of H and not of D. A sample too long for one tile comes in
    several. `at` is the place of the first of its samples in `HeadPass.order`, where the others follow it.
    """

    samples: Tensor
    H: Tensor
    D: Tensor
    first: bool
    last: bool
    at: int

    @property
    def whole(self) -> bool:
        """Whether all tokens of its samples are here."""
        return self.first and self.last


@dataclass(frozen=True)
class Group:
    """Samples `[b]` of similar length; their T tokens each lie one after the other from `start`.

    `at` is the place of the first of them in `HeadPass.order`, where the others follow it. kept: their gradients at E are kept,
    and not their D.
    """

    samples: Tensor
    T: int
    start: int
    at: int
    kept: bool


def by_pairs(T: int, d: int, route: Route | None) -> bool:
    """Whether samples of T tokens are measured by pairs of tokens, if they can be, or else by their gradients at E.

    Both routes need D'H. Pairs also need D D', T products an element of D; formed, a few passes over d / T elements for it.
    Measured, these passes cost about as much as 18 such products.
    """
    return 18 * d > T**2 if route is None else route == "gram"


def row_budget(items: int, token_budget: int) -> int:
    """How many rows `[items]`, of D or of gradients at E, micro-batches of so many tokens may keep: what a `HeadPass` holds at
    the most, and no more than three rows for eight tokens. More are a little quicker where users are long, in more memory.
    """
    return min(3 * token_budget // 8, max(TILE_TOKENS, HOLD_ELEMENTS // max(1, items)))


class HeadPass:
    """One evaluation of the head: its losses, the gradient at H, and D again for those who need it later.

    Of a token's logits, `U = exp(z - shift)` is computed; a factor of all its items is multiplied into its row of H instead:

        D = r (U - total onehot y)      total = sum U      r = w / total

    The shift is the largest logit; or 0 where `|H| max |E| + max |b|` is small enough, as it usually is.

    route: how samples will be measured, as in `PhantomClipping`; "gram" if they will not, or want D in any case.
    """

    def __init__(
        self,
        hidden: Tensor,
        table: Tensor,
        targets: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        workspace: Workspace,
        route: Route | None = "gram",
    ) -> None:
        self.shape = hidden.shape
        self.E, self._E_T = table, table.T
        self.bias, self.out = _split(None if bias is None else bias.to(table.dtype))
        self.workspace = workspace
        positions = self._make_groups(weights, route)
        self.w, self.y = weights.flatten(), targets.flatten()
        self.H = hidden.reshape(-1, hidden.shape[-1])
        if positions is not None:
            self.w = torch.where(self.padding, 0, self.w[positions])
            self.y = torch.where(self.padding, 0, self.y[positions])
            # 0 at padding: what stands there must not matter.
            self.H = self.H[positions].masked_fill_(self.padding[:, None], 0)
        self.w, self.H = self.w.to(table.dtype), self.H.to(table.dtype)
        self.total = torch.ones_like(self.w)
        self.shift = self._make_shift()
        # Of kept samples, which are the first, G; then D of all tokens from `short` on.
        self.long = [group for group in self.groups if group.kept]
        self.short = sum(len(group.samples) * group.T for group in self.long)
        self.G = self.held = None
        kept = sum(len(group.samples) for group in self.long) * self.shape[2]
        rows = kept + len(self.H) - self.short
        if rows * len(table) <= HOLD_ELEMENTS:
            memory = workspace.take("held", rows, len(table), self.H)
            self.G, self.held = memory[:kept].view(-1, self.shape[2], len(table)), memory[kept:]
            workspace.held_by = self
        self.losses, self.bound, gradient = self._forward()
        self.r = (self.w / self.total)[:, None]
        gradient *= self.r
        if positions is not None:
            # Padding repeats a position, with gradient 0: so these are added, not written.
            everywhere = self.H.new_zeros(self.shape[0] * self.shape[1], self.shape[2])
            gradient = everywhere.index_add_(0, positions, gradient)
        self.gradient = gradient.view(self.shape)

    @property
    def scaled(self) -> Tensor:
        """The tokens' hidden states with their factors r, `[tokens, d]`."""
        return self.H * self.r

    def tiles(self, H: Tensor) -> Iterator[Tile]:
        """All samples with at least one weighted token, D and all, with H `[tokens, d]`."""
        for group in self.groups:
            yield from self.tiles_of(group, H)

    def tiles_of(self, group: Group, H: Tensor) -> Iterator[Tile]:
        """The tiles of one group."""
        b = len(group.samples)
        step = group.T if b > 1 else self.group
        for t in range(0, group.T, step):
            T = min(step, group.T - t)
            places = slice(group.start + t, group.start + t + b * T)
            D = self._again(places).view(b, T, -1)
            yield Tile(group.samples, H[places].view(b, T, -1), D, t == 0, t + T == group.T, group.at)

    def kept(self, group: Group) -> Tensor | None:
        """The gradients at E of a group's samples, `[b, d, M]`, transposed; None if they are not kept, or no longer."""
        if not group.kept or self.G is None or self.workspace.held_by is not self:
            return None
        return self.G[group.at : group.at + len(group.samples)]

    def release(self) -> None:
        """Whoever asks again gets it computed again: what was kept was written over."""
        self.workspace.held_by = None

    def _make_groups(self, weights: Tensor, route: Route | None) -> Tensor | None:
        """Cut the samples into groups; returns the positions `[tokens]` of all groups' tokens in the flattened `[B * L]`, or None
        if these are all positions in order.
        """
        B = len(weights)
        self.group = max(TILE_TOKENS, GROUP_ELEMENTS // len(self.E))
        used = weights != 0
        counts = used.sum(1)
        lengths = counts.tolist()
        # Samples often come by length: then nothing has to be put in order.
        self.ordered = all(a >= b > 0 for a, b in pairwise((*lengths, *lengths[-1:])))
        order = torch.arange(B, device=counts.device)
        if not self.ordered:
            order = torch.argsort(counts, descending=True, stable=True)
            lengths = counts[order].tolist()
        self.groups: list[Group] = []
        widths: list[int] = []
        start, k = 0, 0
        while k < B and lengths[k] > 0:
            T = lengths[k]
            n = min(B - k, max(1, self.group // T))
            # Much shorter samples go to a group of their own rather than be padded.
            while 2 * lengths[k + n - 1] < T:
                n -= 1
            samples = order[k : k + n]
            kept = self.shape[2] <= T and not by_pairs(T, self.shape[2], route)
            self.groups.append(Group(samples, T, start, k, kept))
            widths += [T] * n
            start += n * T
            k += n
        # Samples in the order of the groups; those without a weighted token.
        self.order, self.empty = order[:k], order[k:]
        width = torch.tensor(widths, dtype=order.dtype, device=order.device)
        self.owners = self.order.repeat_interleave(width, output_size=start)
        # Of each token, its number in its sample: weighted ones are in front, and what comes after them is padding.
        first = (width.cumsum(0) - width).repeat_interleave(width, output_size=start)
        column = torch.arange(start, device=order.device) - first
        self.padding = column >= counts[self.owners]
        if self.ordered and lengths[-1:] == [weights.shape[1]]:
            return None  # the shortest has them all
        # Padding stands for its sample's first token.
        begin = counts.cumsum(0) - counts
        return used.flatten().nonzero()[:, 0][begin[self.owners] + column.masked_fill(self.padding, 0)]

    def _make_shift(self) -> Tensor | None:
        """Where to keep the largest logit of each token, `[tokens, 1]`; None if it is not needed."""
        if not len(self.H):
            return None
        largest = torch.linalg.vector_norm(self.E, dim=1).amax() * torch.linalg.vector_norm(self.H, dim=1).amax()
        if self.bias is not None:
            largest = largest + torch.where(self.bias == -torch.inf, 0, self.bias).abs().amax()
        # Not the other way round: a comparison with NaN is false.
        return None if bool(largest < LIMIT) else self.H.new_empty(len(self.H), 1)

    def _forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Losses `[B]`, bounds `[B]`, and the gradient at the tokens' hidden states `[tokens, d]`, still without r."""
        gradient = torch.empty_like(self.H)
        hits = torch.empty_like(self.w)
        totals = self.total[:, None]
        tiles = self._cut()
        # All views at once: there are thousands of tiles in a step, and making a view takes about as long as a small operation.
        sizes = [tile.stop - tile.start for tile, *_ in tiles]
        views = (x.split(sizes) for x in (self.H, self.y[:, None], self.w[:, None], hits[:, None], totals, gradient))
        for (places, G, first), H, y, w, hit, total, at_H in zip(tiles, *views, strict=True):
            z = self._logits(places, H)
            torch.gather(z, 1, y, out=hit)
            if self.shift is not None:
                z.sub_(torch.amax(z, 1, keepdim=True, out=self.shift[places]))
            torch.sum(z.exp_(), 1, keepdim=True, out=total)
            z.scatter_add_(1, y, -total)
            torch.mm(z, self.E, out=at_H)
            if G is not None:
                # At beta 0 what was there does not matter, not even if it is not finite.
                G.addmm_((H * (w / total)).T, z, beta=0.0 if first else 1.0)
        self.at_target = -self.total
        loss = self.total.log() - hits + (0 if self.shift is None else self.shift[:, 0])
        # Sum of the norms of the terms of each sample's gradient at E: see `Clip`. |D_t| <= sqrt(2) w (1 - p_y): the other
        # probabilities are at most 1 - p_y together.
        size = (2**0.5) * self.w * (1 - torch.exp(-loss)) * torch.linalg.vector_norm(self.H, dim=1)
        losses, bound = self._per_sample(self.w * loss, size)
        return losses, bound, gradient

    def _cut(self) -> list[tuple[slice, Tensor | None, bool]]:
        """The tokens of tiles, in order; of a kept sample, whose tokens have tiles of their own, where its gradient at E is kept,
        and whether they are its first ones.
        """
        tiles: list[tuple[slice, Tensor | None, bool]] = []
        start = 0
        if self.G is not None:
            start = self.short
            gradients = self.G.unbind()
            for group in self.long:
                for k in range(len(group.samples)):
                    at = group.start + k * group.T
                    for t in range(0, group.T, self.group):
                        tile = slice(at + t, at + min(t + self.group, group.T))
                        tiles.append((tile, gradients[group.at + k], t == 0))
        for at in range(start, len(self.H), TILE_TOKENS):
            tiles.append((slice(at, min(at + TILE_TOKENS, len(self.H))), None, True))
        return tiles

    def _per_sample(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Sums of tokens' values, each `[tokens]`, over the tokens of each sample, each `[B]`."""
        sums = self.H.new_zeros(self.shape[0], len(values))
        sums.index_add_(0, self.owners, torch.stack(values, 1).masked_fill(self.padding[:, None], 0))
        return tuple(part.clone() for part in sums.unbind(1))

    def _logits(self, places: slice, H: Tensor) -> Tensor:
        """Of the tokens at `places`, whose hidden states are H, in memory that is theirs or the next tile's."""
        z = self._held(places)
        if z is None:
            z = self.workspace.take("tile", len(H), len(self.E), H)
        if self.bias is not None:
            return torch.addmm(self.bias, H, self._E_T, out=z)
        torch.mm(H, self._E_T, out=z)
        return z if self.out is None else z.index_fill_(1, self.out, -torch.inf)

    def _held(self, places: slice) -> Tensor | None:
        """Where D of some tokens is kept."""
        if self.held is None or places.start < self.short:
            return None
        return self.held[places.start - self.short : places.stop - self.short]

    def _again(self, places: slice) -> Tensor:
        """`U - total onehot y` of some tokens."""
        if self.workspace.held_by is not self:
            self.held = None  # another pass has written over it
        if (held := self._held(places)) is not None:
            return held
        z = self._logits(places, self.H[places])
        if self.shift is not None:
            z.sub_(self.shift[places])
        return z.exp_().scatter_add_(1, self.y[places, None], self.at_target[places, None])


def _split(bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A bias to be added; or, if it only takes items out, those items: writing a few logits is quicker than adding to all."""
    if bias is None:
        return None, None
    out = bias == -torch.inf
    if bool((out | (bias == 0)).all()):
        return None, out.nonzero()[:, 0]
    return bias, None


class Plain(torch.autograd.Function):
    """The head under plain autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, head: HeadPass, targets: Tensor, weights: Tensor) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(hidden, targets, weights)  # the head may read them again
        return head.losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # an error if they were changed
        head: HeadPass = ctx.head
        at_hidden = head.gradient * upstream[:, None, None] if ctx.needs_input_grad[0] else None
        at_table = None
        if ctx.needs_input_grad[1]:
            total = head.workspace.take("sum", head.E.shape[1], head.E.shape[0], head.E).zero_()
            for tile in head.tiles(head.scaled * upstream[head.owners, None]):
                total.addmm_(tile.H.flatten(0, 1).T, tile.D.flatten(0, 1))
            at_table = total.T.contiguous()
        return at_hidden, at_table, None, None, None

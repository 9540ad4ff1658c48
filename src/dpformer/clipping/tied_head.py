"""Cross-entropy over the whole catalogue with a (shared) table as output layer, a tile of tokens at a time.

For tokens t with hidden state H_t, target y_t and weight w_t, and the table E `[M, d]` with a fixed bias b:

    z_t = E H_t + b      loss = sum_t w_t (logsumexp z_t - z_t[y_t])      D_t = w_t (softmax z_t - onehot y_t)
    gradient at H: D E                                                    gradient at E, for sample i: D_i' H_i

Logits and D exist for one tile at a time, in reused memory; tiles.py has the tiles and what is kept of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from dpformer.clipping.gradient import Route
from dpformer.clipping.tiles import Group, Kept, Tile, Tiling
from dpformer.clipping.workspace import Workspace
from dpformer.errors import ClippingError

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
    """The function behind `TiedCrossEntropy`; a recorder replaces it by its rule."""
    if has_torch_function((hidden, table)):
        arguments = (hidden, table, targets, weights, bias, workspace)
        return handle_torch_function(tied_cross_entropy, (hidden, table), *arguments)
    head = HeadPass(hidden.detach(), table.detach(), targets, weights, bias, workspace)
    return Plain.apply(hidden, table, head, targets, weights)


class HeadPass:
    """One evaluation of the head: its losses, the gradient at H, and D again for its second use.

    Of a token's logits `U = exp(z - shift)` is computed; what all its items have in common goes into its row of H:

        D = r (U - total onehot y)      total = sum U      r = w / total

    The shift is the largest logit; or 0 where `|H| max |E| + max |b|` is small enough, as it usually is.
    route: how samples will be measured, as in `PhantomClipping`; "gram" if they will not.
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
        self.E, self._E_T = table, table.T
        self.bias, self.out = _split(None if bias is None else bias.to(table.dtype))
        self.workspace = workspace
        self.tiling = Tiling(weights, len(table), table.shape[1], route)
        self.w, self.y = self.tiling.take(weights).to(table.dtype), self.tiling.take(targets)
        self.H = self.tiling.take(hidden).to(table.dtype)
        self.total = torch.ones_like(self.w)
        self.shift = self._make_shift()
        self.kept = Kept(self.tiling, table, len(self.H), workspace)
        self.losses, self.bound, gradient = self._forward()
        self.r = (self.w / self.total)[:, None]
        self.gradient = self.tiling.put(gradient.mul_(self.r))

    def scaled(self, upstream: Tensor) -> Tensor:
        """The tokens' hidden states `[tokens, d]` with their factors r and the gradient at their samples' losses `[B]`."""
        return self.H * self.r * upstream[self.tiling.owners, None]

    def tiles(self, group: Group, H: Tensor) -> Iterator[Tile]:
        """The tiles of a group, with D and H `[tokens, d]`."""
        step = group.T if group.size > 1 else self.tiling.most
        for t in range(0, group.T, step):
            T = min(step, group.T - t)
            places = slice(group.start + t, group.start + t + group.size * T)
            D = self._again(places).view(group.size, T, -1)
            yield Tile(H[places].view(group.size, T, -1), D, t == 0, t + T == group.T, group.at)

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
        gradient, hits, totals = torch.empty_like(self.H), torch.empty_like(self.w), self.total[:, None]
        tiles = self.kept.cut(len(self.H))
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
        # The norms of the terms of each sample's gradient at E, summed (see `Clip`): |D_t| <= sqrt(2) w (1 - p_y).
        size = (2**0.5) * self.w * (1 - torch.exp(-loss)) * torch.linalg.vector_norm(self.H, dim=1)
        losses, bound = self.tiling.per_sample(self.w * loss, size)
        return losses, bound, gradient

    def _logits(self, places: slice, H: Tensor) -> Tensor:
        """Of the tokens at `places`, whose hidden states are H, in memory that is theirs or the next tile's."""
        z = self.kept.rows(places)
        if z is None:
            z = self.workspace.take("tile", len(H), len(self.E), H)
        if self.bias is not None:
            return torch.addmm(self.bias, H, self._E_T, out=z)
        torch.mm(H, self._E_T, out=z)
        return z if self.out is None else z.index_fill_(1, self.out, -torch.inf)

    def _again(self, places: slice) -> Tensor:
        """`U - total onehot y` of some tokens."""
        if (D := self.kept.rows(places)) is not None:
            return D
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
    """The losses of a head as a function of its hidden states and, under plain autograd, of its table."""

    samples_first = True  # see `kinds.kind_of`

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, head: HeadPass, targets: Tensor, weights: Tensor) -> Tensor:
        ctx.head = head
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(hidden, targets, weights)  # the head may read them again
        return head.losses.clone()  # else the head would refer to its node of the graph, and the node to the head

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        head: HeadPass = ctx.head
        at_hidden = at_table = None
        if ctx.needs_input_grad[0]:
            # Of a plain sum, as it usually is, without a copy.
            at_hidden = head.gradient if bool((upstream == 1).all()) else head.gradient * upstream[:, None, None]
        if ctx.needs_input_grad[1]:
            _ = ctx.saved_tensors  # an error if they were changed
            total = head.workspace.take("sum", head.E.shape[1], head.E.shape[0], head.E).zero_()
            H = head.scaled(upstream)
            for tile in (tile for group in head.tiling.groups for tile in head.tiles(group, H)):
                total.addmm_(tile.H.flatten(0, 1).T, tile.D.flatten(0, 1))
            at_table = total.T.contiguous()
        return at_hidden, at_table, None, None, None

"""Phantom Clipping of a table whose rows are split over ranks: each clips the rows it has, by norms of all.

All ranks run the same users through the same network; of the table `E = [E_1; ...; E_R]` rank r has `E_r` `[m, d]` and with it

    Z_r = H E_r' + b_r      U_r = exp(Z_r - shift)      D_r = r (U_r - total onehot y, where y is one of its rows)

    total = sum_r sum U_r        gradient at H = sum_r D_r E_r        |G|^2 = sum_r |G_r|^2 + |all other parameters|^2

so that the ranks exchange, for every token, its largest logit (where one is needed), `total` and its target's logit, and the
gradient at H; and for every user two numbers: see `exchanged`. The rows of different ranks are disjoint: hence the plain sum of
squares, in which the term for the tie, `2 sum_{t,u} D[u, s_t] <x_t, H_u>`, is that of the rank that has the row s_t.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from dpformer.clipping import head as tiles
from dpformer.clipping.head import HeadPass, Plain, TiedCrossEntropy
from dpformer.clipping.stream import StreamedGradient
from dpformer.clipping.workspace import Workspace
from dpformer.errors import ClippingError
from dpformer.rows import Rows

if TYPE_CHECKING:
    from dpformer.clipping.gradient import DenseGradients, FormedGradients, OuterGradients, ParameterGradient
    from dpformer.clipping.stream import Weigh


class RowCrossEntropy(TiedCrossEntropy):
    """`TiedCrossEntropy` over all ranks' rows: table `[len(rows), d]` and bias `[len(rows)]` are this rank's.

    All else is as there, and targets are rows of the whole table. It is a collective: all ranks call it, with the same tokens.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def forward(
        self, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See the class."""
        self.check(hidden, targets, weights, bias)
        if len(table) != len(self.rows):
            raise ClippingError(f"this rank has {len(self.rows)} rows of the table, and was given {len(table)}")
        return row_cross_entropy(hidden, table, targets, weights, bias, self._workspace, self.rows)


def row_cross_entropy(
    hidden: Tensor,
    table: Tensor,
    targets: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    workspace: Workspace,
    rows: Rows,
) -> Tensor:
    """The function behind `RowCrossEntropy`; a tape replaces it by its rule."""
    if has_torch_function((hidden, table)):
        arguments = (hidden, table, targets, weights, bias, workspace, rows)
        return handle_torch_function(row_cross_entropy, (hidden, table), *arguments)
    head = RowHeadPass(hidden.detach(), table.detach(), targets, weights, bias, workspace, rows)
    return Plain.apply(hidden, table, head, targets, weights)


class RowHeadPass(HeadPass):
    """A `HeadPass` over this rank's rows, with totals, losses and the gradient at H of all ranks; `bound` is this rank's."""

    def __init__(
        self,
        hidden: Tensor,
        table: Tensor,
        targets: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        workspace: Workspace,
        rows: Rows,
    ) -> None:
        self.rows = rows
        super().__init__(hidden, table, targets, weights, bias, workspace)

    def _make_shift(self) -> Tensor | None:
        if not len(self.H):
            return None
        sizes = self.H.new_zeros(3)
        sizes[0], sizes[1] = (torch.linalg.vector_norm(x, dim=1).amax() for x in (self.E, self.H))
        if self.bias is not None:
            sizes[2] = torch.where(self.bias == -torch.inf, 0, self.bias).abs().amax()
        # One decision for all ranks. NaN has no place in a maximum over ranks: with it a shift is as good as none.
        E, H, b = self.rows.max_(torch.nan_to_num(sizes, nan=torch.inf)).unbind()
        return None if bool(E * H + b < tiles.LIMIT) else self.H.new_empty(len(self.H), 1)

    def _width(self) -> int:
        # The same on all ranks, of which some have a row more: their tokens must lie in the same order.
        return -(-self.rows.count // self.rows.size)

    def _forward(self) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(self.H)
        self.y, owned = self.rows.locate(self.y)
        # Of this rank's rows: what their exponentials sum to, and the target's logit; 0 on the ranks that do not have it.
        parts = self.H.new_zeros(2, len(self.H))
        own, hit = parts
        for start in range(0, len(self.H), tiles.TILE_TOKENS):
            places = slice(start, start + tiles.TILE_TOKENS)
            z = self._logits(places, self.H[places])
            hit[places] = z.gather(1, self.y[places, None])[:, 0]
            if self.shift is not None:
                top = torch.amax(z, 1, keepdim=True, out=self.shift[places])
                z.sub_(torch.where(top == -torch.inf, 0, top))  # a part of the softmax without an item is 0, not NaN
            torch.sum(z.exp_(), 1, out=own[places])
            torch.mm(z, self.E, out=gradient[places])
        hit.masked_fill_(~owned, 0)
        if self.shift is not None and len(self.H):
            # From this rank's largest logit to that of all ranks.
            top = self.shift.clone()
            factor = torch.exp(top - self.rows.max_(self.shift))
            own *= factor[:, 0]
            gradient *= factor
            if self.held is not None:
                self.held *= factor
        share = own.clone()
        if len(self.H):
            self.rows.sum_(parts)
        self.total = own
        self.at_target = torch.where(owned, -self.total, 0)
        gradient.addcmul_(self.E[self.y], self.at_target[:, None])
        if self.held is not None:
            self.held.scatter_add_(1, self.y[:, None], self.at_target[:, None])
        if len(self.H):
            self.rows.sum_(gradient)
        loss = self.total.log() - hit + (0 if self.shift is None else self.shift[:, 0])
        # The part of D_t on this rank is at most sqrt(2) w (1 - p_y) with the target, and w times its probabilities without.
        size = torch.where(owned, (2**0.5) * (1 - torch.exp(-loss)), share / self.total)
        size = self.w * size * torch.linalg.vector_norm(self.H, dim=1)
        losses, bound = self._per_sample(self.w * loss, size)
        return losses, bound, gradient


class RowGradient(StreamedGradient):
    """As `StreamedGradient`, for this rank's rows. Norms wait for the other ranks, so measuring and adding are two passes."""

    def add_weighted_sum(self, weights: Tensor) -> None:
        """Add `sum_i weights[i] G_i` to the `.grad` of this rank's rows."""
        assert self.parameter.grad is not None
        head, factors = self.head, weights.to(self.upstream.dtype) * self.upstream
        none = factors == 0
        # Whoever is not finite has the factor 0, which alone would not take NaN away.
        H = (head.scaled * factors[head.owners, None]).masked_fill_(none[head.owners, None], 0)
        M, d = self.parameter.shape
        total = head.workspace.take("sum", d, M, head.H).zero_()
        for tile in head.tiles(H):
            D = tile.D
            if bool((lost := none[tile.samples]).any()):
                D = D.masked_fill(lost[:, None, None], 0)
            total.addmm_(tile.H.flatten(0, 1).T, D.flatten(0, 1))
        self.parameter.grad.add_(total.T)
        self.others.add_weighted_sum(weights)


def split_parameters(module: nn.Module) -> tuple[Rows | None, set[int]]:
    """How a module's tables are split, None for not at all; and the identities of those that are."""
    found: list[tuple[Rows, nn.Parameter]] = []
    for part in module.modules():
        if isinstance(rows := getattr(part, "rows", None), Rows):
            found += [(rows, p) for p in part.parameters(recurse=False)]
    if len({(rows.rank, rows.size, id(rows.group)) for rows, _ in found}) > 1:
        raise ClippingError("tables are split over different groups of ranks: split all over the same")
    return (found[0][0] if found else None), {id(p) for _, p in found}


def clip_rows(
    gradients: Iterable[ParameterGradient | FormedGradients | OuterGradients | DenseGradients | StreamedGradient],
    split: set[int],
    rows: Rows,
    losses: Tensor,
    weigh: Weigh | None,
) -> tuple[Tensor, int]:
    """Squared norms `[B]` of the samples' gradients over all ranks, and how many are not finite; with `weigh`, the weighted sum
    is added to `.grad`: of this rank's rows, and of all that every rank has.

    What every rank has is counted by rank 0. The sums over ranks are the same bits on all of them, and so are the weights.
    """
    gradients = list(gradients)
    squared = torch.where(losses.isfinite(), 0.0, torch.nan).double()
    parts = torch.stack([squared, torch.zeros_like(squared)])
    for gradient in gradients:
        found = gradient.measure()
        if rows.rank == 0 or id(getattr(gradient, "parameter", None)) in split:
            parts += torch.stack(found)
    squared, bound = rows.sum_(parts)
    lost = ~(squared.isfinite() & bound.isfinite())
    if weigh is not None:
        if bool(lost.any()):
            for gradient in gradients:
                gradient.forget(lost)
        weights = weigh(torch.arange(len(losses), device=losses.device), squared, bound)
        weights = torch.where(lost, 0.0, weights)
        for gradient in gradients:
            gradient.add_weighted_sum(weights)
    return squared, int(lost.sum())


def exchanged(samples: int, positions: int, tokens: int, d: int, shift: bool = False) -> tuple[int, int]:
    """How many numbers ranks sum up for a micro-batch: of the parameters' type, and of float64. No size of a catalogue is in it.

    positions: what is looked up, padding and all; tokens: what the head sees, `len(HeadPass.H)`, about the weighted positions.
    shift: whether logits are so large that each token's largest is needed.

    >>> exchanged(samples=8, positions=80, tokens=60, d=64)
    (9083, 16)
    """
    return positions * d + 3 + tokens * (2 + shift) + tokens * d, 2 * samples

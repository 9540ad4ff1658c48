"""Phantom Clipping proper: the gradient of a table that is input and output layer at once.

`tied_squared_norms` is the paper's claim, with misprints corrected, for reading and tests. `TiedGradient` computes the same over
tiles of tokens: nothing of size M x M or B x M x d is built. Where a sample has about as many tokens as the table has columns, or
more, D D' costs more than the gradient `G = D'H + onehot(s)'x` itself, which is then formed for a few samples at a time in reused
memory. Gradients are formed and summed transposed, `[d, M]`: H'D is up to twice as fast as D'H.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpformer.clipping.algebra import Form, Outer, Sparse, inner
from dpformer.clipping.gradient import Route, gradient_of
from dpformer.clipping.sums import BLOCK, squared_norms
from dpformer.clipping.tied_head import HeadPass
from dpformer.clipping.tiles import Group, Tile, by_pairs

# From samples, their squared norms and squared bounds, each [b], to their weights in the sum, [b].
Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]

# Elements of gradients that are formed at once: 8 MB of float32, or one sample's.
FORMED_ELEMENTS = 2**21
# Tokens at a time in products of D with itself: products of a few long rows run several times as fast as those of 16 or more.
PIECE = 8


def tied_squared_norms(s: Tensor, x: Tensor, D: Tensor, H: Tensor) -> Tensor:
    """`|G_i|^2` `[B]` of a table that is input and output layer: the claim Phantom Clipping, eq:phantom, proof apdx:pfphan.

        |G|^2 = sum_{t,u} [s_t = s_u] <x_t, x_u>  +  <H H', D D'>  +  2 sum_{t,u} D[u, s_t] <x_t, H_u>

    s `[B, T]`: tokens looked up. x `[B, T, d]`: gradient at what was looked up, the paper's grad e_s. D `[B, U, M]`: gradient at
    the logits. H `[B, U, d]`: input of the output layer. The paper's grad e_c is D'H, which is not built here:
    `|D'H|^2 = <H H', D D'>`. The first term is printed squared, a misprint from eq:phantom_p_1, whose left-hand side lacks the
    square (tests/clipping/test_tied.py); and `a_s' grad e_c` in the third has to be `a_s grad e_c`, rows s_t of D'H.
    """
    same_token = s[:, :, None] == s[:, None, :]
    input_side = (x @ x.mT * same_token).sum((1, 2))
    output_side = ((H @ H.mT) * (D @ D.mT)).sum((1, 2))
    D_at_tokens = D.gather(2, s[:, None, :].expand(-1, D.shape[1], -1))  # [B, U, T]
    cross = (D_at_tokens * (H @ x.mT)).sum((1, 2))
    return input_side + output_side + 2 * cross


@dataclass
class Head:
    """The form of a table's use as output layer; `upstream` `[B]` is the gradient at the losses."""

    head: HeadPass
    upstream: Tensor


class TiedGradient:
    """Per-sample gradients of a table with one use as output layer and any other uses. See `Gradient`."""

    def __init__(self, parameter: nn.Parameter, head: Head, others: list[Form], batch: int, route: Route | None = None):
        self.parameter, self.route = parameter, route
        self.head, self.upstream = head.head, head.upstream.to(parameter.dtype)
        self.others = gradient_of(parameter, others, batch, route, self.head.workspace)

    def measure(self) -> tuple[Tensor, Tensor]:
        return self.clip(None)

    def add(self, weights: Tensor) -> None:
        self.clip(lambda samples, squared, bound: weights[samples])

    def drop(self, samples: Tensor) -> None:
        self.upstream = self.upstream.masked_fill(samples, 0)
        self.others.drop(samples)

    def clip(self, weigh: Weigh | None, rest: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Squared norms and squared bounds `[B]`; and, if `weigh` is given, the weighted sum in the same pass over D.

        rest: squared norms and bounds of the samples' other gradients, to be added for `weigh`.
        """
        others, tiling = self.others.bound(), self.head.tiling
        bound = (others + self.head.bound.double() * self.upstream.abs().double()).square()
        # Squared norms of the other uses alone, for samples that are not formed: of formed ones they are in the gradient.
        all_formed = not len(tiling.empty) and not any(self._by_pairs(group) for group in tiling.groups)
        squared = torch.zeros_like(bound) if all_formed else self.others.squared()
        rest_squared, bounds = (torch.zeros_like(bound), bound) if rest is None else (rest[0], rest[1] + bound)
        # By sample in the order of the tiles, so that a tile takes a slice.
        order = tiling.order
        pass_ = _Pass(self, weigh, squared[order], rest_squared[order], bounds[order])
        H: Tensor | None = None
        formed = self.head.kept.all_gradients()
        if formed is not None:
            pass_.kept(formed)
        for group in tiling.groups:
            if group.kept and formed is not None:
                continue
            if H is None:
                H = self.head.scaled(self.upstream)
            for tile in self.head.tiles(group, H):
                pass_.by_pairs(tile) if self._by_pairs(group) else pass_.formed(tile)
        squared[order] = pass_.squared
        if weigh is not None and pass_.total is not None:
            assert self.parameter.grad is not None
            self.parameter.grad.add_(pass_.close_block().T)
            self.head.kept.release()
            if not all_formed:
                # The other uses are added here, but for those that went into a formed gradient.
                pending = torch.zeros_like(squared)
                pending[order] = pass_.pending
                empty = tiling.empty
                pending[empty] = weigh(empty, rest_squared[empty] + squared[empty], bounds[empty]).double()
                if (dropped := ~squared.isfinite()).any():
                    self.others.drop(dropped)
                self.others.add(pending)
        return squared, bound

    def _by_pairs(self, group: Group) -> bool:
        """Whether a group's samples are measured by pairs of tokens."""
        forms = self.others.forms
        simple = not forms or (len(forms) == 1 and isinstance(forms[0], Sparse))
        whole = group.size > 1 or self.head.tiling.most >= group.T
        return simple and whole and not group.kept and by_pairs(group.T, self.parameter.shape[1], self.route)


class _Pass:
    """One pass over D. Everything by sample is in the order of the tiles.

    squared: squared norms, first of the other uses, then of all uses; rest: of all other gradients; bound: squared bounds.
    """

    def __init__(self, gradient: TiedGradient, weigh: Weigh | None, squared: Tensor, rest: Tensor, bound: Tensor):
        self.head, self.upstream, self.shape = gradient.head, gradient.upstream, gradient.parameter.shape
        self.weigh, self.order = weigh, self.head.tiling.order
        self.squared, self.rest, self.bound = squared, rest, bound
        self.pending = torch.zeros_like(squared)
        self.forms = gradient.others.forms
        self.sparse: Sparse | None = None
        if len(self.forms) == 1 and isinstance(form := self.forms[0], Sparse):
            ordered = self.head.tiling.ordered
            self.sparse = form if ordered else Sparse(form.index[self.order], form.values[self.order])
        # The sum of a block of samples, and of all blocks in float64: rounding in a long float32 sum grows with its length.
        self.total = self._take("sum", 1)[0].zero_() if weigh is not None else None
        self._whole: Tensor | None = None
        self._added = 0

    def close_block(self) -> Tensor:
        """Add `total` to the sum of all blocks, and begin another; returns that sum, `[d, M]`, float64."""
        assert self.total is not None
        if self._whole is None:
            double = torch.empty(0, dtype=torch.float64, device=self.total.device)
            self._whole = self.head.workspace.take(
                "sum of blocks", len(self.total), self.total.shape[1], double
            ).zero_()
        self._whole.add_(self.total)
        self.total.zero_()
        self._added = 0
        return self._whole

    def _make_room(self, samples: int) -> None:
        """Before so many samples are added: close the block if it would have too many."""
        if self._added and self._added + samples > BLOCK:
            self.close_block()
        self._added += samples

    def by_pairs(self, tile: Tile) -> None:
        """Samples by their pairs of tokens."""
        part = slice(tile.at, tile.at + len(tile.H))
        own = Outer(tile.D, tile.H)
        squared = self.squared[part] + _products(tile.D, tile.H)
        if self.sparse is not None:
            squared += 2 * inner(own, Sparse(self.sparse.index[part], self.sparse.values[part]))
        weights, finite = self._settle(part, squared)
        if weights is not None and self.total is not None:
            if not finite:
                own.drop(~squared.isfinite())
            H = own.cols * weights.to(own.cols.dtype)[:, None, None]
            for k in range(0, len(H), BLOCK):
                block = slice(k, k + BLOCK)
                self._make_room(len(H[block]))
                self.total.addmm_(H[block].flatten(0, 1).T, own.rows[block].flatten(0, 1))
            self.pending[part] = weights

    def formed(self, tile: Tile) -> None:
        """Samples by their gradients themselves, a few at a time."""
        M, d = self.shape
        b = len(tile.H)
        for k, n in _parts(b, FORMED_ELEMENTS // (M * d)):
            part = slice(tile.at + k, tile.at + k + n)
            # A sample in several tiles is alone in them; its gradient stays in memory from the first to the last.
            buffer = self._take("formed", n)
            H, D = tile.H[k : k + n].transpose(1, 2), tile.D[k : k + n]
            if tile.first:
                torch.bmm(H, D, out=buffer)
            else:
                buffer.baddbmm_(H, D)
            if tile.last:
                self._finish(part, buffer)

    def kept(self, G: Tensor) -> None:
        """Samples whose gradients `[b, d, M]` were formed with their losses, a few at a time; they are the first."""
        for k, n in _parts(len(G), FORMED_ELEMENTS // max(1, G[0].numel())):
            part, buffer = slice(k, k + n), G[k : k + n]
            if self.weigh is None:
                # They may be needed once more, and the other uses are added in place.
                buffer = self._take("formed", n).copy_(buffer)
            upstream = self.upstream[self.order[part]]
            if bool((upstream != 1).any()):
                buffer.mul_(upstream[:, None, None])
            self._finish(part, buffer)

    def _finish(self, part: slice, buffer: Tensor) -> None:
        """Add the other uses to gradients `[b, d, M]` at the head; note their norms, and add them to the sum."""
        for form in [self.sparse] if self.sparse is not None else self.forms:
            form.form_into(buffer, part if form is self.sparse else self.order[part], transposed=True)
        squared = squared_norms(buffer)
        weights, finite = self._settle(part, squared)
        if weights is not None and self.total is not None:
            if not finite:
                buffer.masked_fill_(~squared.isfinite()[:, None, None], 0)
            weights = weights.to(buffer.dtype)
            for k in range(0, len(buffer), BLOCK):
                block = slice(k, k + BLOCK)
                self._make_room(len(buffer[block]))
                self.total.view(-1).addmv_(buffer[block].flatten(1).T, weights[block])

    def _settle(self, part: slice, squared: Tensor) -> tuple[Tensor | None, bool]:
        """Note squared norms `[b]`; returns the weights in the sum, `[b]`, 0 for what is not finite, and whether all are."""
        self.squared[part] = squared
        if self.weigh is None:
            return None, True
        weights = self.weigh(self.order[part], self.rest[part] + squared, self.bound[part])
        # Of numbers that are not negative: one infinity or NaN makes the sum one.
        finite = math.isfinite(float(squared.sum()))
        return (weights if finite else torch.where(squared.isfinite(), weights, 0.0)), finite

    def _take(self, name: str, samples: int) -> Tensor:
        """Memory for transposed gradients, `[samples, d, M]`."""
        M, d = self.shape
        return self.head.workspace.take(name, samples * d, M, self.head.H).view(samples, d, M)


def _parts(b: int, most: int) -> Iterator[tuple[int, int]]:
    """Where parts of b begin, and how many each has: about the same, and no more than `most`, or one."""
    step = -(-b // -(-b // max(1, most)))
    for k in range(0, b, step):
        yield k, min(step, b - k)


def _products(D: Tensor, H: Tensor) -> Tensor:
    """`<H H', D D'>` `[b]`, float64, for D `[b, T, M]` and H `[b, T, d]`.

    Both matrices are symmetric: from `PIECE` tokens with those up to them, pairs before the piece count twice.
    """
    T = D.shape[1]
    HH = torch.bmm(H, H.transpose(1, 2))
    if T < 2 * PIECE - 2:
        return torch.bmm(D, D.transpose(1, 2)).mul_(HH).sum((1, 2), dtype=torch.float64)
    total = torch.zeros(len(D), dtype=torch.float64, device=D.device)
    for t in range(0, T, PIECE):
        a, u = slice(t, t + PIECE), slice(0, t + PIECE)
        pairs = torch.bmm(D[:, a], D[:, u].transpose(1, 2)).mul_(HH[:, a, u])
        total += pairs.sum((1, 2), dtype=torch.float64)
        if t:
            total += pairs[..., :t].sum((1, 2), dtype=torch.float64)
    return total

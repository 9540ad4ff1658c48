"""The paper's claim (eq:phantom): its reference and the streamed code against autograd, one sample at a time, in float64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.clipping import PhantomClipping, TiedCrossEntropy, tied, tiles
from dpformer.clipping.algebra import Outer, inner
from dpformer.clipping.tied import tied_squared_norms

pytestmark = pytest.mark.usefixtures("float64")

SquaredNorms = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Tied:
    """A table E as input and output layer, with a function of no parameters between: s, y `[B, T]`."""

    def __init__(self, B: int = 4, T: int = 7, M: int = 5, d: int = 3) -> None:
        self.table = nn.Embedding(M, d)
        self.s, self.y = torch.randint(0, M, (B, T)), torch.randint(0, M, (B, T))
        self.w = torch.rand(B, T) + 0.1

    def hidden(self, embedded: Tensor) -> Tensor:
        return torch.tanh(embedded).cumsum(1)

    def losses(self, logits: Tensor) -> Tensor:
        return (F.cross_entropy(logits.mT, self.y, reduction="none") * self.w).sum(1)

    def expected(self) -> Tensor:
        """Squared norms by autograd: one backward pass per sample."""
        E = self.table.weight
        losses = self.losses(self.hidden(self.table(self.s)) @ E.T)
        return torch.stack([torch.autograd.grad(one, E, retain_graph=True)[0].square().sum() for one in losses])

    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, D and H, by autograd."""
        embedded = self.table(self.s)
        H = self.hidden(embedded)
        logits = H @ self.table.weight.detach().T
        x, D = torch.autograd.grad(self.losses(logits).sum(), (embedded, logits))
        return x, D, H.detach()

    def streamed(self, route: str | None) -> Tensor:
        head, E = TiedCrossEntropy(), self.table.weight
        clipping = PhantomClipping(self.table, route=route)
        return clipping.norms(lambda: head(self.hidden(self.table(self.s)), E, self.y, self.w)).square()


def check(squared_norms: SquaredNorms, model: Tied) -> None:
    torch.testing.assert_close(squared_norms(model.s, *model.factors()), model.expected(), rtol=1e-10, atol=1e-12)


def without_the_cross_term(s: Tensor, x: Tensor, D: Tensor, H: Tensor) -> Tensor:
    nothing = torch.zeros_like
    return tied_squared_norms(s, x, nothing(D), nothing(H)) + tied_squared_norms(s, nothing(x), D, H)


def as_printed(s: Tensor, x: Tensor, D: Tensor, H: Tensor) -> Tensor:
    first = tied_squared_norms(s, x, torch.zeros_like(D), torch.zeros_like(H))
    return tied_squared_norms(s, x, D, H) - first + first.square()


sizes = given(
    B=st.integers(1, 5), T=st.integers(1, 9), M=st.integers(1, 12), d=st.integers(1, 6), seed=st.integers(0, 2**31)
)


@settings(max_examples=40, deadline=None)
@sizes
def test_the_claim_is_the_norm_of_autograds_gradient(B, T, M, d, seed):
    torch.manual_seed(seed)
    check(tied_squared_norms, Tied(B, T, M, d))


@settings(max_examples=40, deadline=None)
@sizes
@pytest.mark.parametrize("route", ["gram", "formed", None])
@pytest.mark.parametrize("hold", [0, 2**20])
def test_the_streamed_code_computes_the_claim(route, hold, B, T, M, d, seed):
    torch.manual_seed(seed)
    model = Tied(B, T, M, d)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_TOKENS", 3)
        patch.setattr(tiles, "HOLD_ELEMENTS", hold)
        streamed = model.streamed(route)
    torch.testing.assert_close(streamed, tied_squared_norms(model.s, *model.factors()), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("wrong", [without_the_cross_term, as_printed])
def test_a_wrong_formula_is_found(wrong):
    with pytest.raises(AssertionError):
        check(wrong, Tied())


def test_a_streamed_pass_without_the_cross_term_is_found(monkeypatch):
    """The mistake of libraries that hook modules: input and output side are measured apart."""

    def no_cross(a, b):
        return inner(a, b) if isinstance(b, Outer) else 0 * inner(a, b)

    model = Tied()
    monkeypatch.setattr(tied, "inner", no_cross)
    streamed = model.streamed("gram")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(streamed, model.expected(), rtol=1e-3, atol=0.0)

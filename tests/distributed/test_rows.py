"""A table split over ranks: norms and sums are those of the whole table, and of one user at a time through autograd."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.clipping import PhantomClipping, TiedCrossEntropy
from dpformer.clipping import head as head_module
from dpformer.clipping import phantom as phantom_module
from dpformer.clipping import stream as stream_module
from dpformer.clipping.forms import Outer, Sparse
from dpformer.clipping.rows import RowCrossEntropy, exchanged
from dpformer.errors import ClippingError, DPFormerError
from dpformer.models import rows as embedding_module
from dpformer.models.base import SequenceModel
from dpformer.models.recurrent import GRURecommender
from dpformer.models.rows import RowEmbedding
from dpformer.models.transformer import ReAttention, Transformer
from dpformer.rows import Rows
from tests.clipping.oracle import automatic, flat, loop, weighted
from tests.distributed.processes import together

USERS, LENGTH, D = 7, 9, 6


@dataclass(frozen=True)
class Case:
    """items; scale of the table (large ones make logits that need a shift); what is in the batch; how it is computed."""

    items: int = 11
    model: str = "transformer"
    tied: bool = True
    vocabulary: int | None = None
    bias: bool = False
    scale: float = 40.0
    highest: int | None = None  # items of the batch are below this: other ranks then have no token
    broken: bool = False  # a user whose weights are infinite
    alone: bool = False  # one user
    dropout: float = 0.0
    rule: str = "automatic"
    route: str | None = None
    tile: int = 64
    hold: int = 2**20
    dtype: str = "float64"
    defect: str = ""

    def build(self, split: Any = None) -> SequenceModel:
        torch.manual_seed(1)
        common = {"tied": self.tied, "vocabulary": self.vocabulary, "split": split}
        if self.model == "gru":
            made: SequenceModel = GRURecommender(self.items, D, **common)
        else:
            r = ReAttention() if self.model == "reattention" else None
            made = Transformer(self.items, LENGTH, d=D, dropout=self.dropout, reattention=r, **common)
        with torch.no_grad():
            for p in {id(p): p for p in (made.embedding.weight, made.table)}.values():
                p.mul_(self.scale)
        frequencies = torch.rand(self.items + 1) * 0.9 + 0.1
        made.choose(frequencies, bias=self.bias)
        if self.model == "reattention":
            made.set_errors(1.0, 20.0, frequencies, torch.ones(LENGTH))
        return made

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.items)
        rows = self.vocabulary or self.items
        tokens = torch.randint(1, (self.highest or rows) + 1, (USERS, LENGTH + 1), generator=generator)
        tokens[2, 4:] = 0
        tokens[5, 1:] = 0  # a single item: nothing to predict
        s, y = tokens[:, :-1], tokens[:, 1:]
        w = (y > 0) / (y > 0).sum(1, keepdim=True).clamp_min(1)
        if self.broken:
            w[3, 0] = torch.inf
        users = slice(1) if self.alone else slice(None)
        return s[users], y[users], w[users].to(getattr(torch, self.dtype))


EXACT = {
    "plain": Case(),
    "even": Case(items=39),
    "gram": Case(route="gram"),
    "formed": Case(route="formed"),
    "small logits": Case(scale=1.0, bias=True),
    "huge logits": Case(scale=4000.0),
    "recomputed": Case(hold=0, tile=5),
    "recomputed, small": Case(hold=0, tile=3, scale=1.0, route="gram"),
    "untied": Case(tied=False, bias=True),
    "vocabulary": Case(items=30, vocabulary=13, bias=True),
    "as few items as ranks": Case(items=4),
    "one rank has all tokens": Case(items=40, highest=4),
    "flat": Case(rule="flat"),
    "dropout": Case(dropout=0.3),
    "gru": Case(model="gru", items=23),
    "re-attention": Case(model="reattention", items=17, bias=True),
    "not finite": Case(broken=True),
    "not finite, recomputed": Case(broken=True, hold=0),
    "many items": Case(items=400, highest=11),
}
DEFECTS = {
    "no cross term on rank 1": Case(items=6, defect="cross", route="gram"),
    "norms of this rank alone": Case(defect="norm"),
    "all ranks count what all have": Case(defect="twice"),
    "a look-up of this rank alone": Case(defect="look-up"),
    "a total of this rank alone": Case(defect="total"),
}

FLOAT32 = Case(dtype="float32", items=300)
OTHERS = {
    "float32": FLOAT32,
    "alone": Case(dtype="float32", items=300, rule="flat", alone=True),
    "alone, huge": Case(dtype="float32", items=20, scale=4000.0, rule="flat", alone=True),
}


def run_case(case: Case, model: SequenceModel, head: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Norms, losses and gradients, under clipping and (`plain`) under autograd."""
    s, y, w = data
    found: dict[str, Any] = {}

    def losses() -> Tensor:
        torch.manual_seed(5)  # dropout
        value = head(model(s), model.table, y, w, model.table_bias)
        found["losses"] = value.detach().clone()
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "HOLD_ELEMENTS", case.hold)
        patch.setattr(head_module, "TILE_TOKENS", case.tile)
        patch.setattr(head_module, "GROUP_ELEMENTS", 1)
        clipping = PhantomClipping(model, rule=case.rule, route=case.route)
        found["norms"] = clipping.backward(losses)
        found["nonfinite"] = clipping.nonfinite
        found["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        if not case.broken:
            model.zero_grad()
            losses().sum().backward()
            found["plain"] = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return found


def plant(defect: str, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Break one thing on purpose."""
    if defect == "cross" and rank == 1:
        whole = stream_module.inner
        crossed = (Outer, Sparse)
        patch.setattr(stream_module, "inner", lambda a, b: whole(a, b) * (0 if (type(a), type(b)) == crossed else 1))
    if defect == "twice":
        everything = lambda module: (module.part, {id(p) for p in module.parameters()})  # noqa: E731
        patch.setattr(phantom_module, "split_parameters", everything)
    lonely = {"norm": lambda x: x.dim() == 2 and x.shape == (2, USERS), "look-up": lambda x: x.dim() == 3}
    lonely["total"] = lambda x: x.dim() == 2 and x.shape[0] == 2 and x.shape[1] != USERS
    if defect in lonely:
        joined = Rows.sum_
        patch.setattr(Rows, "sum_", lambda rows, x: x if lonely[defect](x) else joined(rows, x))


def on_a_rank(rank: int, size: int) -> dict[str, Any]:
    """All cases, in one process of several."""
    found: dict[str, Any] = {}
    for name, case in {**EXACT, **DEFECTS, **OTHERS}.items():
        torch.set_default_dtype(getattr(torch, case.dtype))
        model = case.build(partial(Rows, rank=rank, size=size))
        sent: list[tuple[int, int]] = []
        real = dist.all_reduce

        def count(x: Tensor, *arguments: Any, sent: Any = sent, real: Any = real, **options: Any) -> Any:
            sent.append((x.numel(), x.element_size()))
            return real(x, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            plant(case.defect, rank, patch)
            patch.setattr(dist, "all_reduce", count)
            found[name] = run_case(case, model, RowCrossEntropy(model.part), case.batch())
        found[name]["sent"] = sent
        found[name]["rows"] = (model.part.first, model.part.last)
        shared = [g for n, g in found[name]["gradients"].items() if n not in ("embedding.weight", "output.weight")]
        same = hashlib.sha256()
        for value in [found[name]["norms"], found[name]["losses"], *shared]:
            same.update(value.numpy().tobytes())
        found[name]["digest"] = same.hexdigest()
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return together(request.param, on_a_rank)


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> Any:
    """The same case with the table in one piece."""

    def compute(case: Case) -> dict[str, Any]:
        torch.set_default_dtype(getattr(torch, case.dtype))
        return run_case(case, case.build(), TiedCrossEntropy(), case.batch())

    yield compute
    torch.set_default_dtype(torch.float32)


def joined(ranks: list[dict[str, Any]], name: str, kind: str) -> dict[str, Tensor]:
    """Gradients of all ranks put together: rows joined, what every rank has taken from rank 0."""
    parts = [found[name][kind] for found in ranks]
    split = ("embedding.weight", "output.weight")
    return {n: torch.cat([part[n] for part in parts]) if n in split else g for n, g in parts[0].items()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of two gradients over all parameters, relative."""
    wrong = sum((a[n].double() - b[n].double()).square().sum() for n in b)
    return float((wrong / sum(g.double().square().sum() for g in b.values())).sqrt())


@pytest.mark.parametrize("name", EXACT)
def test_the_split_table_is_the_whole_table(ranks, whole, name):
    expected = whole(EXACT[name])
    found = ranks[0][name]
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-12, atol=1e-13, equal_nan=True)
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-12, atol=1e-13, equal_nan=True)
    assert distance(joined(ranks, name, "gradients"), expected["gradients"]) < 1e-12
    assert found["nonfinite"] == expected["nonfinite"] == EXACT[name].broken
    if not EXACT[name].broken:
        assert distance(joined(ranks, name, "plain"), expected["plain"]) < 1e-12


@pytest.mark.parametrize("name", EXACT)
def test_all_ranks_have_the_same_bits_of_what_all_have(ranks, name):
    assert len({found[name]["digest"] for found in ranks}) == 1
    assert [found[name]["rows"][0] for found in ranks[1:]] == [found[name]["rows"][1] for found in ranks[:-1]]


@pytest.mark.parametrize("name", [name for name, case in EXACT.items() if not (case.dropout or case.broken)])
def test_the_split_table_is_one_user_at_a_time(ranks, float64, name):
    case = EXACT[name]
    norms, gradients = loop(case.build(), autograd_losses, case.batch())
    torch.testing.assert_close(ranks[0][name]["norms"], norms, rtol=1e-12, atol=1e-13)
    factors = automatic(norms) if case.rule == "automatic" else flat(norms)
    # The room for rounding, 1e-6 of the norm, is meant.
    assert distance(joined(ranks, name, "gradients"), weighted(gradients, factors)) < 2e-6


def autograd_losses(model: SequenceModel, batch: tuple[Tensor, ...]) -> Tensor:
    """The definition, with torch's own cross-entropy."""
    s, y, w = batch
    z = model(s) @ model.table.T + model.table_bias
    each = F.cross_entropy(z.transpose(1, 2), y, reduction="none")
    return torch.where(w > 0, each * w, 0).sum(1)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_shows_in_the_norms(ranks, whole, name):
    expected = whole(DEFECTS[name])["norms"]
    wrong = max(float(((found[name]["norms"] - expected) / expected.clamp_min(1e-9)).abs().max()) for found in ranks)
    assert wrong > 1e-4


@pytest.mark.parametrize("name", ["plain", "small logits", "huge logits", "recomputed", "many items"])
def test_what_travels_is_as_large_as_the_tokens(ranks, name):
    """Every number that ranks sum up, counted: the formula, for clipping and again for plain autograd, and no catalogue in it."""
    case = EXACT[name]
    s, _, w = case.batch()
    sent = ranks[0][name]["sent"]
    assert all(found[name]["sent"] == sent for found in ranks)
    # Look-up, sizes, (largest logits,) totals, gradient; and under clipping the squares.
    shift = len(sent) == 11
    assert len(sent) == (11 if name == "huge logits" else 9)
    samples = [n for n in (w > 0).sum(1).tolist() if n]
    float64 = sum(n for n, _ in sent if n == 2 * USERS)
    others = sum(n for n, _ in sent) - float64
    tokens = sent[-2][0] // 2
    assert sum(samples) <= tokens <= s.numel()
    numbers, squares = exchanged(USERS, s.numel(), tokens, D, shift)
    assert (others, float64) == (2 * numbers, squares)


def test_the_catalogue_is_not_in_what_travels(ranks):
    """11 items and 400, the same tokens: the same numbers."""
    assert EXACT["many items"].items > 30 * EXACT["plain"].items
    assert torch.equal(EXACT["many items"].batch()[2], EXACT["plain"].batch()[2])
    assert ranks[0]["many items"]["sent"] == ranks[0]["plain"]["sent"]


def test_float32_stays_below_the_bound_and_near(ranks, whole):
    expected = whole(FLOAT32)
    torch.testing.assert_close(ranks[0]["float32"]["norms"], expected["norms"], rtol=1e-4, atol=1e-6)
    assert distance(joined(ranks, "float32", "gradients"), expected["gradients"]) < 1e-4


def test_one_user_adds_at_most_the_bound(ranks):
    """Alone in the batch, over all ranks: the norm of what is added is at most C (1 + 1e-6), and near it."""
    for name in ("alone", "alone, huge"):
        size = sum(g.double().square().sum() for g in joined(ranks, name, "gradients").values()).sqrt()
        assert 0.9 < float(size) <= 1 + 1e-6


@pytest.mark.parametrize(("count", "d"), [(1, 3), (2, 7), (5, 3), (16, 16), (100, 7), (1000, 3), (257, 16)])
def test_a_split_table_starts_as_the_whole_one(monkeypatch, count, d):
    monkeypatch.setattr(embedding_module, "BLOCK", 64)
    for size in (1, 2, 4):
        if count < size:
            continue
        parts = []
        for rank in range(size):
            torch.manual_seed(3)
            parts.append(RowEmbedding(Rows(count, rank, size), d).weight.detach())
            after = torch.rand(3)
        torch.manual_seed(3)
        assert torch.equal(torch.cat(parts), torch.empty(count, d).normal_())
        assert torch.equal(after, torch.rand(3))


def test_refusals():
    with pytest.raises(DPFormerError, match="3 rows cannot be split over 4 ranks: start at most 3 processes"):
        Rows(3, 0, 4)
    with pytest.raises(DPFormerError, match="rank 2"):
        Rows(9, 2, 2)
    s, y, w = Case(dtype="float32").batch()
    rows = Rows(12, 0, 2)
    with pytest.raises(ClippingError, match="6 rows of the table, and was given 12"):
        RowCrossEntropy(rows)(torch.zeros(*s.shape, D), torch.zeros(12, D), y, w)
    model = Case(dtype="float32").build(partial(Rows, rank=0, size=2))
    with pytest.raises(DPFormerError, match="gather it first"):
        model.scores(s, torch.ones(USERS))
    # A head that is not split, with a table that is: its norms would be of a part.
    hidden = torch.zeros(*s.shape, D)
    table = model.embedding

    def losses() -> Tensor:
        return TiedCrossEntropy()(hidden, table.weight, y.clamp_max(5), w)

    with pytest.raises(ClippingError, match="RowCrossEntropy goes with RowEmbedding"):
        PhantomClipping(table).norms(losses)

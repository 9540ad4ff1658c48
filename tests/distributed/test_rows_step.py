"""A step with the tables split over ranks: the clipped sum of the whole table, noise once on every number of it, one ledger."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dpformer.data import PoissonSampler, Sequences
from dpformer.errors import DPFormerError, PrivacyError
from dpformer.models.base import SequenceModel
from dpformer.privacy import PrivacyPlan, create_ledger, make_plan, noise_source, read_ledger
from dpformer.privacy import plan as plan_module
from dpformer.privacy.noise import NoiseSource
from dpformer.rows import Rows
from dpformer.training.ranks import Ranks
from dpformer.training.row_trainer import RowTrainer
from dpformer.training.rows import RankLedger, seed_of
from dpformer.training.trainer import Optimisation, Trainer
from tests.distributed.processes import together
from tests.training.conftest import small_recipe

ITEMS, LENGTH, STEPS = 13, 5, 6
SPLIT = ("embedding.weight", "output.weight")


class Silent(NoiseSource):
    """No noise: to see the clipped sum."""

    mode, insecure, dtype = "seeded", True, np.float32

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.used = seed, 0

    def normal(self, count: int) -> np.ndarray:
        return np.zeros(count, np.float32)

    def state(self) -> dict[str, Any]:
        return {"mode": self.mode, "seed": self.seed, "used": self.used}

    def restore(self, state: Any) -> None:
        self.used = state["used"]

    def add_noise_(self, gradients: Any, std: float) -> None:
        self.used += 1


def sequences() -> Sequences:
    random = np.random.default_rng(0)
    lengths = [1, 2, 3, 4, 9, 5, 1, 2, 7, 3, 12, 6]
    items = random.integers(1, ITEMS + 1, sum(lengths)).astype(np.int32)
    return Sequences(pl.Series([str(n) for n in range(len(lengths))]), items, np.cumsum([0, *lengths]))


TRAIN = sequences()


def build(split: Any = None, **options: Any) -> SequenceModel:
    torch.manual_seed(3)
    model = small_recipe(max_length=LENGTH, **options).build(ITEMS, split).double()
    if options.get("popularity_bias"):
        model.choose(torch.arange(ITEMS + 1.0) / ITEMS, bias=True)
    return model


PLANS: dict[tuple[float, float], PrivacyPlan] = {}


def plan_for(epsilon: float, rate: float) -> PrivacyPlan:
    """Made once, and given to the processes: making one takes seconds."""
    if (epsilon, rate) not in PLANS:
        batch = max(1, int(rate * len(TRAIN)))
        PLANS[epsilon, rate] = make_plan(len(TRAIN), epsilon, 1e-3, batch_size=batch, steps=STEPS)
    return PLANS[epsilon, rate]


def make(
    folder: Path,
    ranks: Ranks | None = None,
    noise: NoiseSource | None = None,
    epsilon: float = 50,
    rate: float = 0.5,
    **options: Any,
) -> Any:
    """A trainer; with ranks, that of one of them."""
    plan, rank = plan_for(epsilon, rate), 0 if ranks is None else ranks.rank
    how = Optimisation(max_length=LENGTH, token_budget=16, weight_decay=0.0, averaging="ema")
    model = build(None if ranks is None else partial(Rows, rank=rank, size=ranks.size), **options)
    # Only rank 0's draws and random numbers count: the others' are different, to see that.
    torch.manual_seed(4 + rank)
    sampler = PoissonSampler(plan.users, plan.rate, 7 + rank)
    ledger = create_ledger(folder, plan) if rank == 0 and plan.private else None
    source = (noise or noise_source("seeded", seed_of(5, rank))) if plan.private else None
    if ranks is None:
        return Trainer(model, TRAIN, plan, how, sampler, source, ledger)
    return RowTrainer(model, TRAIN, plan, how, sampler, source, ledger, ranks)


def gradients(made: Trainer) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in made.model.named_parameters()}


def parameters(made: Trainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in made.model.named_parameters()}


def refused(call: Any) -> str:
    with pytest.raises(DPFormerError) as caught:
        call()
    return str(caught.value)


def on_a_rank(rank: int, size: int, place: str, plans: dict[tuple[float, float], PrivacyPlan]) -> dict[str, Any]:
    """What each rank sees of several trainings, one after the other."""
    PLANS.update(plans)
    found: dict[str, Any] = {}
    ranks = Ranks(rank, size, tensors=dist.group.WORLD, words=dist.group.WORLD)
    plan_module.epsilon = functools.cache(plan_module.epsilon)  # a ledger that is read checks its plan anew

    def folder(name: str) -> Path:
        path = Path(place) / f"{size}-{name}"
        path.mkdir(exist_ok=True)
        return path

    # One step, with noise and dropout; when noise is added, the ledger must say so already.
    made = make(folder("noise"), ranks)
    found["rows"] = (made.model.part.first, made.model.part.last)
    charged: list[int] = []
    adds = made.noise.source.add_noise_

    def add(gradients: Any, std: float) -> None:
        charged.append(read_ledger(folder("noise")).steps_charged)
        adds(gradients, std)

    made.noise.source.add_noise_ = add
    found["first"], found["report"] = (report := made.make_step()) and gradients(made), (report.users, report.loss)
    # Go on; from a state taken in the middle, the same.
    made.make_step()
    state = made.state()
    for _ in range(2):
        made.make_step()
    found["charged"], found["after"] = charged, parameters(made)
    made.restore(*state)
    for _ in range(2):
        made.make_step()
    found["again"] = parameters(made)
    made.ledger.close()

    for name, options in {
        "plain": {},
        "dropout": {"dropout": 0.3},
        "untied": {"tied": False, "popularity_bias": True, "histogram_share": 0.1},
        "vocabulary": {"vocabulary": 6, "histogram_share": 0.1},
        "gru": {"model": "gru"},
    }.items():
        made = make(folder(name), ranks, Silent(rank), **options)
        for _ in range(3):
            made.make_step()
        found[name], shared = parameters(made), hashlib.sha256()
        for n, p in found[name].items():
            if n not in SPLIT:
                shared.update(p.numpy().tobytes())
        found[f"{name}, digest"] = shared.hexdigest()
        made.ledger.close()

    made = make(folder("inf"), ranks, epsilon=float("inf"))
    for _ in range(3):
        made.make_step()
    found["inf"] = parameters(made)

    # Nobody is drawn: noise alone.
    made = make(folder("empty"), ranks, rate=0.1)
    made._draw = lambda: (np.zeros(0, np.int64),) * 2
    made.make_step()
    found["empty"] = gradients(made)
    made.ledger.close()

    # Two ranks with one stream of noise.
    made = make(folder("shared"), ranks, noise_source("seeded", 5))
    found["shared"] = refused(made.make_step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankLedger, "_charge", lambda self, step, every: True)
        made._draw = lambda: (np.zeros(0, np.int64),) * 2
        made.make_step()
    found["shared, unguarded"] = gradients(made)
    made.ledger.close()

    # A budget that is spent, and a sum that is not finite on one rank: all ranks end, with the reason.
    made = make(folder("spent"), ranks)
    list(made.run())
    found["spent"] = refused(made.make_step)
    made.ledger.close()
    made = make(folder("drifted"), ranks)
    if rank == 1:
        made.model.norm.bias.data += 1e-6
    found["drifted"] = refused(made.make_step)
    made.ledger.close()
    made = make(folder("broken"), ranks)

    def broken(batch: Any) -> float:
        if rank == size - 1:
            made.model.table.grad[0, 0] = torch.nan
        return 0.0

    made._add_gradients = broken
    found["broken"] = refused(made.make_step)
    made.ledger.close()
    return found


@pytest.fixture(scope="module", params=[2])
def ranks(request: pytest.FixtureRequest) -> Any:
    for given in [(50, 0.5), (50, 0.1), (float("inf"), 0.5)]:
        plan_for(*given)
    with tempfile.TemporaryDirectory() as place:
        yield together(request.param, on_a_rank, place, PLANS)


def joined(ranks: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    parts = [found[name] for found in ranks]
    return {n: torch.cat([part[n] for part in parts]) if n in SPLIT else value for n, value in parts[0].items()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    wrong = sum((a[n] - b[n]).square().sum() for n in b)
    return float((wrong / sum(value.square().sum() for value in b.values())).sqrt())


def drawn(ranks: list[dict[str, Any]], made: Trainer) -> dict[str, Tensor]:
    """The noise of a first step, from each rank's source: rank 0's for what all have and for its rows, in order of names."""
    std, found = made.plan.noise_std(made.how.max_norm), {}
    for rank, here in enumerate(ranks):
        source = noise_source("seeded", seed_of(5, rank))
        first, last = here["rows"]
        for name, p in sorted(made.model.named_parameters()):
            if name in SPLIT or rank == 0:
                shape = (last - first, p.shape[1]) if name in SPLIT else p.shape
                z = torch.from_numpy(source.normal(int(np.prod(shape)))).mul_(std).reshape(shape).double()
                found.setdefault(name, []).append(z)
    return {name: torch.cat(parts) if name in SPLIT else parts[0] for name, parts in found.items()}


def test_a_step_is_the_clipped_sum_of_the_whole_table_and_noise_once(ranks, tmp_path):
    whole = make(tmp_path, noise=Silent())
    report = whole.make_step()
    noise = drawn(ranks, whole)
    expected = {n: g + noise[n] / whole.plan.batch_size for n, g in gradients(whole).items()}
    assert distance(joined(ranks, "first"), expected) < 1e-12
    for found in ranks:
        assert found["report"] == pytest.approx((report.users, report.loss), rel=1e-9)


def test_nobody_drawn_is_noise_alone(ranks, tmp_path):
    whole = make(tmp_path, rate=0.1)
    noise = drawn(ranks, whole)
    assert distance(joined(ranks, "empty"), {n: z / whole.plan.batch_size for n, z in noise.items()}) < 1e-12


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("untied", {"tied": False, "popularity_bias": True, "histogram_share": 0.1}),
        ("vocabulary", {"vocabulary": 6, "histogram_share": 0.1}),
        ("gru", {"model": "gru"}),
        ("dropout", {"dropout": 0.3}),
    ],
)
def test_three_steps_without_noise_are_those_of_the_whole_table(ranks, tmp_path, name, options):
    whole = make(tmp_path, noise=Silent(), **options)
    for _ in range(3):
        whole.make_step()
    assert distance(joined(ranks, name), parameters(whole)) < 1e-9
    assert len({found[f"{name}, digest"] for found in ranks}) == 1


def test_without_privacy_too(ranks, tmp_path):
    whole = make(tmp_path, epsilon=float("inf"))
    for _ in range(3):
        whole.make_step()
    assert distance(joined(ranks, "inf"), parameters(whole)) < 1e-9


def test_a_state_goes_on_to_the_same_bits(ranks):
    for found in ranks:
        assert all(torch.equal(found["again"][n], p) for n, p in found["after"].items())


def test_no_rank_adds_noise_before_the_ledger_says_so(ranks):
    for found in ranks:
        assert found["charged"] == [1, 2, 3, 4, 4, 4]  # made again, the last two are the same release


def test_ranks_with_one_stream_of_noise_are_refused_by_all(ranks):
    assert "two ranks would draw the same noise" in ranks[0]["shared"]
    assert all(found["shared"] == "rank 0 cannot go on; it says why" for found in ranks[1:])


def alike(ranks: list[dict[str, Any]], name: str) -> int:
    """How many numbers of noise two ranks have in common: the check that a shared stream turns red."""
    first, second = ranks[0][name], ranks[1][name]
    mine = torch.cat([z.flatten() for z in first.values()])
    return int(torch.isin(second["embedding.weight"], mine).sum())


def test_noise_of_two_ranks_is_not_the_same(ranks):
    assert alike(ranks, "empty") == 0
    assert alike(ranks, "shared, unguarded") > 10


def test_a_refusal_ends_all_ranks(ranks):
    assert "is not between 1 and" in ranks[0]["spent"]
    assert "rank 1 is at another step, or has other data, settings or weights" in ranks[0]["drifted"]
    for found in ranks[1:]:
        assert found["spent"] == found["drifted"] == "rank 0 cannot go on; it says why"
    assert all("not finite on some rank" in found["broken"] for found in ranks)


def test_a_split_model_needs_its_ranks():
    plan = plan_for(50, 0.5)
    with pytest.raises(PrivacyError, match="not split over these ranks"):
        RowTrainer(
            build(), TRAIN, plan, Optimisation(), PoissonSampler(plan.users, plan.rate, 7), None, None, Ranks(1, 2)
        )
    with pytest.raises(PrivacyError, match="rank 0 writes the ledger"):
        RankLedger(plan, Ranks(0, 2), None)

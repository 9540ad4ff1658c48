"""A step and the sum that it asks for, against one user at a time through plain autograd in float64."""

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from dpformer.data import Sequences
from dpformer.errors import PrivacyError
from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.fit.workers import Team, Worker
from dpformer.models import Network, build
from dpformer.models.dropout import use_masks
from dpformer.privacy import Curator, Keys, PrivacyPlan, Sample, create_ledger, make_plan, read_ledger
from dpformer.privacy.noise import kept_by_dropout, poisson_draw, rounded_gaussian
from dpformer.privacy.query import grid_step
from dpformer.training.groups import Groups, add_rounded
from tests.recipes import small_recipe

ITEMS, LENGTH = 9, 5
GRID = 2.0**-26
Arrays = Mapping[str, np.ndarray]


def sequences(lengths: list[int], seed: int = 0) -> Sequences:
    random = np.random.default_rng(seed)
    items = random.integers(1, ITEMS + 1, sum(lengths)).astype(np.int32)
    return Sequences(pl.Series([str(n) for n in range(len(lengths))]), items, np.cumsum([0, *lengths]))


# A user with a single item, users longer than the greatest length, and enough of them for several micro-batches.
TRAIN = sequences([1, 2, 3, 4, 9, 5, 1, 2, 7, 3, 12, 6])
USERS = len(TRAIN)


def without(people: Sequences, user: int) -> Sequences:
    """The neighbour: as many people, and this one has no events."""
    start, end = people.offsets[user], people.offsets[user + 1]
    offsets = people.offsets.copy()
    offsets[user + 1 :] -= end - start
    return Sequences(people.users, np.delete(people.items, np.arange(start, end)), offsets)


made_plans: dict[str, PrivacyPlan] = {}


def plan_of(users: int = USERS, epsilon: float = 50, **options: Any) -> PrivacyPlan:
    """A plan; finding its noise takes a while, so each is made once."""
    key = repr((users, epsilon, options))
    if key not in made_plans:
        options = {"batch_size": max(1, users // 2), "steps": 6, **options}
        made_plans[key] = make_plan(users, epsilon, 1e-3, **options)
    return made_plans[key]


def trainer(
    plan: PrivacyPlan | None = None, how: Optimisation | None = None, block: int = 4, **options: Any
) -> Trainer:
    """A trainer of a float64 network, with groups of `block` people each."""
    plan = plan or plan_of()
    torch.manual_seed(3)
    kind = options.pop("model", "transformer")
    model = build(small_recipe(model=kind, max_length=LENGTH, **options).network.spec(ITEMS)).double()
    made = Trainer(model, plan, how or Optimisation(max_length=LENGTH, token_budget=16, weight_decay=0.0))
    made.query.groups = Groups(block, block)
    return made


class Recorded:
    """The noise of the library, and what was drawn of it."""

    def __init__(self) -> None:
        self.drawn: list[np.ndarray] = []
        self.stds: list[float] = []

    def __call__(self, key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        self.stds.append(std)
        self.drawn.append(rounded_gaussian(key, shape, std))
        return self.drawn[-1]


def curator(
    folder: Path,
    plan: PrivacyPlan,
    train: Sequences = TRAIN,
    noise: Callable[..., np.ndarray] = rounded_gaussian,
    draw: Callable[..., np.ndarray] = poisson_draw,
    keys: Keys | None = None,
) -> Curator[Sequences]:
    ledger = create_ledger(folder, plan) if plan.private else None
    return Curator(train, plan, ledger, keys or Keys(5), noise=noise, draw=draw)


def own_gradient(model: Network, items: np.ndarray) -> list[torch.Tensor]:
    """One user's gradient, from the definition: the mean of -log softmax over the items that follow, real items only."""
    tokens = torch.from_numpy(items[-(LENGTH + 1) :].astype(np.int64))[None]
    parameters = list(model.parameters())
    if tokens.shape[1] < 2:
        return [torch.zeros_like(p) for p in parameters]
    logits = model.states(tokens[:, :-1])[0] @ model.table[1:].T
    loss = nn.functional.cross_entropy(logits, tokens[0, 1:] - 1)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def clipped_sum(
    made: Trainer, users: np.ndarray, people: Sequences = TRAIN, model: Network | None = None
) -> dict[str, np.ndarray]:
    """sum_i c_i g_i in float64, one user at a time; without privacy every c is 1."""
    model = model or made.model
    total = [torch.zeros_like(p) for p in model.parameters()]
    C = made.how.max_norm
    for user in users:
        gradient = own_gradient(model, people[user])
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
        factor = {"automatic": C / (norm + 0.01), "flat": min(1.0, C / max(norm, 1e-300))}[made.how.rule]
        total = [t + (factor if made.plan.private else 1.0) * g for t, g in zip(total, gradient, strict=True)]
    names = [name for name, _ in model.named_parameters()]
    return {name: t.detach().numpy() for name, t in zip(names, total, strict=True)}


def sum_of(made: Trainer, users: np.ndarray, people: Sequences = TRAIN, key: bytes = bytes(32)) -> Arrays:
    """The clipped sum as the Curator gets it, in whole steps of GRID."""
    return made.query.sum(people, Sample(users, key), GRID)


def flat(arrays: Arrays) -> np.ndarray:
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])


def distance(a: Arrays, b: Arrays) -> float:
    """L2, relative to b."""
    return float(np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b)))


def gradient_of_step(made: Trainer, asker: Curator[Sequences]) -> dict[str, np.ndarray]:
    """What the optimiser was given."""
    made.make_step(asker)
    return {name: p.grad.clone().numpy() for name, p in made.model.named_parameters()}


# The sum


@pytest.mark.parametrize(
    ("model", "rule", "max_norm"),
    [("transformer", "automatic", 1.0), ("transformer", "flat", 0.5), ("gru", "automatic", 2.0), ("lstm", "flat", 1.0)],
)
@pytest.mark.parametrize("block", [1, 5, USERS])
def test_the_sum_is_that_of_one_user_at_a_time(model, rule, max_norm, block):
    """Off by half a step for each number and group, and by the slack of the clipping, 2e-6 of the norm for each person."""
    how = Optimisation(rule=rule, max_norm=max_norm, max_length=LENGTH, token_budget=16)
    made = trainer(how=how, model=model, block=block)
    for users in (np.arange(USERS), np.array([1, 4, 5, 10]), np.array([0])):
        found, expected = sum_of(made, users), clipped_sum(made, users)
        groups = len(np.unique(users // block))
        for name, value in found.items():
            assert value.dtype == np.int64
            off = np.abs(value - expected[name] / GRID)
            assert off.max() <= groups / 2 + len(users) * 2e-6 * max_norm / GRID, name
        if len(users) > 1:
            assert distance({n: v * GRID for n, v in found.items()}, expected) < 3e-6


def test_the_sum_in_float32_is_that_of_float64():
    """Within 2^-21 of the norm for each person, the slack that the sensitivity has for it."""
    made = trainer()
    exact = copy.deepcopy(made.model)
    made.model.float()
    with torch.no_grad():
        for p, q in zip(exact.parameters(), made.model.parameters(), strict=True):
            p.copy_(q)
    everybody = np.arange(USERS)
    found, expected = sum_of(made, everybody), clipped_sum(made, everybody, model=exact)
    off = flat(found) - flat(expected) / GRID
    rounding = math.sqrt(len(off)) / 2 * math.ceil(USERS / 4)
    # 2e-5: with float32 the room of the clipping for rounding (see `Clip`) lowers each norm by about 1e-5.
    assert np.linalg.norm(off) < rounding + USERS * (2.0**-21 + 2e-5) / GRID


def test_a_sum_without_privacy_is_not_clipped():
    made = trainer(plan_of(epsilon=math.inf))
    found, expected = sum_of(made, np.arange(USERS)), clipped_sum(made, np.arange(USERS))
    assert np.abs(flat(found) - flat(expected) / GRID).max() <= USERS / 4 / 2 + 1


def test_with_a_vocabulary_a_user_is_still_one_sample():
    """Everybody's items in the vocabulary, found without the trainer; a user left with none or one of them adds nothing."""
    made = trainer(vocabulary=4, recency=0.8)
    p = torch.full((ITEMS + 1,), 0.1, dtype=torch.float64)
    rows = {8: 1, 2: 2, 5: 3, 9: 4}
    for item, row in rows.items():
        p[item] = 1 - row / 10
    made.model.choose(p, bias=True)
    bias = (p[list(rows)] / p[1:].sum()).log()
    parameters = list(made.model.parameters())
    total = [torch.zeros_like(q) for q in parameters]
    silent = 0
    for items in TRAIN:
        known = torch.tensor([rows[i] for i in items.tolist() if i in rows], dtype=torch.int64)[-(LENGTH + 1) :]
        if len(known) < 2:
            silent += 1
            continue
        logits = made.model.states(known[None, :-1])[0] @ made.model.table[1:].T + bias
        found = torch.autograd.grad(nn.functional.cross_entropy(logits, known[1:] - 1), parameters)
        norm = float(torch.sqrt(sum(g.square().sum() for g in found)))
        total = [t + g / (norm + 0.01) for t, g in zip(total, found, strict=True)]
    assert silent
    names = [name for name, _ in made.model.named_parameters()]
    expected = {name: t.numpy() for name, t in zip(names, total, strict=True)}
    assert distance({n: v * GRID for n, v in sum_of(made, np.arange(USERS)).items()}, expected) < 3e-6


def test_a_user_whose_loss_is_no_number_adds_nothing_and_is_counted():
    first = torch.from_numpy(TRAIN[4][-(LENGTH + 1) :].astype(np.int64))

    class Broken(Worker):
        """Whoever begins with the items of user 4 gets a loss that is no number."""

        def losses(self, tokens: torch.Tensor) -> torch.Tensor:
            hit = torch.tensor([torch.equal(row[: len(first)], first) for row in tokens])
            return super().losses(tokens) * torch.where(hit, torch.nan, 1.0)

    made = trainer()
    made.query.team = Team(Broken(made.model, made.clipping), 1)
    found = sum_of(made, np.arange(USERS))
    expected = clipped_sum(made, np.delete(np.arange(USERS), 4))
    assert distance({n: v * GRID for n, v in found.items()}, expected) < 3e-6
    assert (made.query.report.users, made.query.report.nonfinite) == (USERS, 1)
    assert math.isfinite(made.query.report.loss)


def test_a_sum_that_is_not_finite_is_refused_before_it_is_charged(tmp_path):
    class Broken(Worker):
        def add(self, batch, masks=None):
            loss = super().add(batch, masks)
            self.model.embedding.weight.grad[1, 0] = torch.inf
            return loss

    made = trainer()
    made.query.team = Team(Broken(made.model, made.clipping), 1)
    asker = curator(tmp_path, made.plan)
    before = flat({n: p.detach().numpy() for n, p in made.model.named_parameters()})
    with pytest.raises(PrivacyError, match=r"parameter 'embedding.weight' is not finite; nothing was released"):
        made.make_step(asker)
    assert (read_ledger(tmp_path).entries, asker.keys.place, made.step) == ((), 0, 0)
    assert np.array_equal(before, flat({n: p.detach().numpy() for n, p in made.model.named_parameters()}))


# Groups


@pytest.mark.parametrize(("users", "rate"), [(2, 0.5), (60, 0.5), (6040, 0.17), (10**6, 0.002), (31013, 1.0), (9, 1.0)])
def test_groups_are_by_the_place_alone(users, rate):
    groups = Groups.of(users, rate)
    random = np.random.default_rng(1)
    drawn = np.flatnonzero(random.random(users) < rate)
    split = groups.split(drawn)
    assert np.array_equal(np.concatenate([*split.values(), np.zeros(0, int)]), drawn)
    for number, part in split.items():
        assert len(part) <= groups.most
        assert set(part // groups.block) == {number}
    # Somebody who is not drawn changes nobody else's group.
    if len(drawn) > 1:
        gone = int(random.integers(len(drawn)))
        fewer = groups.split(np.delete(drawn, gone))
        for number, part in split.items():
            left = part[part != drawn[gone]]
            assert np.array_equal(fewer.get(number, np.zeros(0, int)), left)


@pytest.mark.parametrize("rate", [1.0, 0.9, 0.5, 0.17, 0.01])
def test_more_than_most_of_a_group_are_never_drawn(rate):
    """The exact binomial tail, over all groups of a million people: below 1e-15 for one draw."""
    from scipy.stats import binom

    groups = Groups.of(10**6, rate)
    tail = binom.sf(groups.most, groups.block, rate)
    assert tail * math.ceil(10**6 / groups.block) < 1e-15
    with pytest.raises(PrivacyError, match="the sampler is not the plan's"):
        Groups(groups.block, groups.most - 1).split(np.arange(groups.most))
    groups.split(np.arange(groups.most))


def test_nobody_is_in_no_group():
    assert Groups(4, 4).split(np.arange(0)) == {}


def test_rounding_adds_whole_steps_exactly():
    random = np.random.default_rng(0)
    gradient = torch.from_numpy(random.normal(size=(300, 171)).astype(np.float32))
    gradient[0, :3] = torch.tensor([1.5, 2.5, -0.5]) * 2.0**-26  # halves go to the even step
    total = torch.from_numpy(random.integers(-(2**40), 2**40, size=(300, 171)).astype(np.float64))
    expected = total.numpy().astype(np.int64) + np.array([round(float(g) * 2**26) for g in gradient.flatten()]).reshape(
        300, 171
    )
    add_rounded(total, gradient, 2.0**26)
    assert np.array_equal(total.numpy(), expected.astype(np.float64))
    # A transposed tensor is not contiguous in memory.
    total = torch.zeros(171, 300, dtype=torch.float64)
    add_rounded(total, gradient.T, 2.0**26)
    assert np.array_equal(total.numpy(), np.rint(gradient.numpy().T.astype(np.float64) * 2**26))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("model", ["transformer", "gru"])
def test_leaving_touches_the_whole_numbers_of_one_group_only(dropout, model):
    made = trainer(model=model, dropout=dropout)
    made.model.float().train()
    everybody, key = np.arange(USERS), b"k" * 32

    def of_group(people: Sequences, number: int) -> np.ndarray:
        return flat(made.query.sum_groups(people, {number: everybody[number * 4 : number * 4 + 4]}, GRID, key))

    whole = {number: of_group(TRAIN, number) for number in range(3)}
    total = flat(sum_of(made, everybody, key=key))
    assert np.array_equal(total, sum(whole.values()))
    for user in (1, 4, 10):
        fewer = without(TRAIN, user)
        for number in range(3):
            assert np.array_equal(of_group(fewer, number), whole[number]) == (number != user // 4)
        moved = np.linalg.norm((flat(sum_of(made, everybody, fewer, key)) - total).astype(np.float64))
        assert 0.5 / GRID < moved <= made.query.sensitivity(GRID)


@pytest.mark.parametrize("masks", ["by the person", "by torch"])
def test_dropout_of_one_person_does_not_depend_on_the_others(masks):
    """The control: masks that torch draws for a whole batch move the sum by several clipping norms when somebody leaves."""

    class OwnMasks(Team):
        def sum(self, parts, grid, masks):
            torch.manual_seed(0)
            return super().sum(parts, grid, None)

    people = sequences([7] * 40, seed=2)
    made = trainer(plan_of(40), block=40, dropout=0.2, how=Optimisation(max_length=LENGTH, token_budget=4096))
    made.model.float().train()
    if masks == "by torch":
        made.query.team = OwnMasks(made.worker, 1)
    everybody = np.arange(40)
    total = flat(sum_of(made, everybody, people))
    moved = [
        float(np.linalg.norm((flat(sum_of(made, everybody, without(people, user))) - total).astype(np.float64)))
        for user in (0, 3, 20)
    ]
    most = made.query.sensitivity(GRID)
    if masks == "by torch":
        assert max(moved) > 2 * most
    else:
        assert max(moved) <= most


def test_masks_are_those_of_step_and_person():
    """The sum with dropout is that of one person at a time under that person's masks, made here from the cipher."""
    made = trainer(dropout=0.3)
    made.model.train()
    key = b"m" * 32
    total = [torch.zeros_like(p) for p in made.model.parameters()]
    for user in range(USERS):
        calls = iter(range(100))

        def mask(shape, rate, user=user, calls=calls):
            kept = kept_by_dropout(key, user, next(calls), math.prod(shape[1:]), rate)
            return torch.from_numpy(kept.reshape(shape)).double() / (1 - rate)

        use_masks(made.model, mask)
        gradient = own_gradient(made.model, TRAIN[user])
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
        total = [t + g / (norm + 0.01) for t, g in zip(total, gradient, strict=True)]
    use_masks(made.model, None)
    names = [name for name, _ in made.model.named_parameters()]
    expected = {name: t.detach().numpy() for name, t in zip(names, total, strict=True)}
    found = {n: v * GRID for n, v in sum_of(made, np.arange(USERS), key=key).items()}
    assert distance(found, expected) < 3e-6
    other = {n: v * GRID for n, v in sum_of(made, np.arange(USERS), key=b"n" * 32).items()}
    assert distance(other, expected) > 1e-2  # another step


def test_torchs_own_dropout_is_refused():
    made = trainer()
    made.model.more = nn.Dropout(0.2)
    with pytest.raises(PrivacyError, match="draws the masks of a whole batch at once"):
        sum_of(made, np.arange(USERS))
    made.model.more = nn.Dropout(0.0)
    sum_of(made, np.arange(USERS))


def test_less_exact_arithmetic_is_refused():
    made = trainer()
    users = np.arange(USERS)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PrivacyError, match="autocast is on"):
        sum_of(made, users)
    for precision in ("medium", "high"):
        try:
            torch.set_float32_matmul_precision(precision)
            with pytest.raises(PrivacyError, match="set to be less exact"):
                sum_of(made, users)
        finally:
            torch.set_float32_matmul_precision("highest")
    made.model.bfloat16()
    with pytest.raises(PrivacyError, match=r"of type torch\.bfloat16"):
        sum_of(made, users)
    made.model.float()
    sum_of(made, users)


def test_the_sensitivity_is_the_formula():
    made = trainer(how=Optimisation(max_norm=0.5, max_length=LENGTH))
    d = sum(p.numel() for p in made.model.parameters())
    grid = grid_step(0.5, d)
    assert grid == 2.0**-27
    assert made.query.sensitivity(grid) == pytest.approx(2**26 * (1 + 1e-6 + 4 * 2**-21) + math.sqrt(d), rel=1e-15)
    assert (made.query.bound, made.query.numbers) == (0.5, d)


# The step


@pytest.mark.parametrize("epsilon", [50, math.inf])
@pytest.mark.parametrize("batch_size", [USERS // 2, USERS])
def test_a_step_is_the_clipped_sum_and_noise_by_the_expected_batch(tmp_path, epsilon, batch_size):
    plan = plan_of(epsilon=epsilon, batch_size=batch_size)
    made, noise = trainer(plan), Recorded()
    asker = curator(tmp_path, plan, noise=noise)
    checked = 0
    for _ in range(4):
        users = poisson_draw(asker.keys.sample(), USERS, plan.rate)
        expected = clipped_sum(made, users)
        names = [name for name, _ in made.model.named_parameters()]
        noise.drawn.clear()
        got = gradient_of_step(made, asker)
        for name, z in zip(names, noise.drawn, strict=False):
            expected[name] = expected[name] + z * GRID
        assert len(noise.drawn) == (len(names) if plan.private else 0)
        assert distance(got, {n: v / batch_size for n, v in expected.items()}) < 3e-6
        if len(users) not in (0, batch_size):  # the planted defect: division by the realised size
            assert distance(got, {n: v / len(users) for n, v in expected.items()}) > 1e-2
            checked += 1
    assert checked or batch_size == USERS
    least = plan.noise_multiplier * made.query.sensitivity(GRID)
    assert all(least <= std <= least * (1 + 1e-12) for std in noise.stds)


@pytest.mark.parametrize("defect", [None, "half the noise"])
def test_noise_has_the_standard_deviation_of_the_plan(tmp_path, defect):
    """Nobody has anything to learn from, so the gradient is noise alone: sigma C / B. Within 5 sigma: 1 in 2 million."""
    nothing = sequences([1] * 40)
    plan = plan_of(40, 10, batch_size=10, steps=40)
    made = trainer(plan, Optimisation(max_norm=0.5, max_length=LENGTH), block=40)

    def half(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        return rounded_gaussian(key, shape, std / 2)

    asker = curator(tmp_path, plan, nothing, noise=half if defect else rounded_gaussian)
    drawn = np.concatenate([flat(gradient_of_step(made, asker)) for _ in range(20)])
    expected = plan.noise_multiplier * 0.5 / 10
    # The relative error of a standard deviation from n values is 1 / sqrt(2 n); the sensitivity has a slack of 2e-5 and sqrt(d).
    within = abs(drawn.std() / expected - 1) < 5 / (2 * len(drawn)) ** 0.5 + 3e-5
    assert within == (defect is None)
    if not defect:
        assert abs(drawn.mean()) < 5 * expected / len(drawn) ** 0.5
        assert len(np.unique(drawn)) > 0.99 * len(drawn)  # fresh at every step


@pytest.mark.parametrize("who", ["nobody", "people without known items"])
def test_an_empty_batch_is_a_step_of_noise_and_is_charged(tmp_path, who):
    plan = plan_of(batch_size=USERS, steps=3)
    made, noise = trainer(plan, vocabulary=1), Recorded()
    p = torch.full((ITEMS + 1,), 0.1)
    p[2] = 1.0
    made.model.choose(p, bias=False)
    people = Sequences(TRAIN.users, np.ones_like(TRAIN.items), TRAIN.offsets)
    draw = (lambda key, users, rate: np.arange(0)) if who == "nobody" else poisson_draw
    report = made.make_step(curator(tmp_path, plan, people, noise=noise, draw=draw))
    assert report.users == (0 if who == "nobody" else USERS)
    assert (report.loss, report.nonfinite) == (0.0, 0)
    got = np.concatenate([q.grad.numpy().reshape(-1) for q in made.model.parameters()])
    assert np.array_equal(got, np.concatenate([z.reshape(-1) for z in noise.drawn]) * GRID / USERS)
    assert read_ledger(tmp_path).steps_charged == 1


def test_the_step_is_charged_before_its_noise_is_drawn(tmp_path):
    made, charged = trainer(), []

    def watched(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        charged.append(read_ledger(tmp_path).steps_charged)  # from the file: it has to be there
        return rounded_gaussian(key, shape, std)

    asker = curator(tmp_path, made.plan, noise=watched)
    made.make_step(asker)
    made.make_step(asker)
    tensors = len(list(made.model.parameters()))
    assert charged == [1] * tensors + [2] * tensors


def test_a_ledger_that_cannot_be_written_keeps_the_step_from_being_made(tmp_path):
    made, noise = trainer(), Recorded()
    asker = curator(tmp_path, made.plan, noise=noise)
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    asker.ledger.close()
    with pytest.raises(PrivacyError, match="could not be written"):
        made.make_step(asker)
    assert (made.step, asker.keys.place, noise.drawn) == (0, 0, [])
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())


def test_no_step_beyond_the_plan(tmp_path):
    made = trainer()
    asker = curator(tmp_path, made.plan)
    assert len(list(made.run(asker))) == 6
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    with pytest.raises(PrivacyError, match="the budget is spent: the plan has 0 releases and 6 steps"):
        made.make_step(asker)
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())


def again(asker: Curator[Sequences], state: dict[str, object], **options: Any) -> Curator[Sequences]:
    """A Curator that goes on from earlier keys, with the ledger as it is now."""
    people = options.pop("people", TRAIN)
    return Curator(people, asker.plan, asker.ledger, Keys.restored(state), **options)


def test_a_replayed_step_is_the_same_and_free(tmp_path):
    made = trainer(dropout=0.3)
    asker = curator(tmp_path, made.plan)
    made.make_step(asker)
    (tensors, values), keys = made.state(), asker.keys.state()
    first = gradient_of_step(made, asker)
    made.make_step(asker)
    assert read_ledger(tmp_path).steps_charged == 3
    made.restore(tensors, values)
    torch.rand(1)  # what else the process draws does not matter, with dropout neither
    assert distance(gradient_of_step(made, again(asker, keys)), first) == 0
    assert read_ledger(tmp_path).steps_charged == 3


@pytest.mark.parametrize("what", ["gradients 1.5 times as large", "another sample", "other data", "another key"])
def test_a_replay_with_another_sum_is_refused(tmp_path, what):
    made = trainer()
    asker = curator(tmp_path, made.plan)
    (tensors, values), keys = made.state(), asker.keys.state()
    made.make_step(asker)
    made.restore(tensors, values)
    options: dict[str, Any] = {}
    if what.startswith("gradients"):

        class Larger(Worker):
            def add(self, batch, masks=None):
                loss = super().add(batch, masks)
                for p in self.model.parameters():
                    p.grad *= 1.5
                return loss

        made.query.team = Team(Larger(made.model, made.clipping), 1)
    elif what == "another sample":
        options["draw"] = lambda key, users, rate: poisson_draw(key[::-1], users, rate)
    elif what == "other data":
        drawn = poisson_draw(Keys.restored(keys).sample(), USERS, made.plan.rate)
        options["people"] = without(TRAIN, int(next(u for u in drawn if len(TRAIN[u]) > 1)))
    else:
        keys = keys | {"secret": "00" * 32}
    noise = Recorded()
    with pytest.raises(PrivacyError, match="was charged for another sum than the one made now"):
        made.make_step(again(asker, keys, noise=noise, **options))
    assert (noise.drawn, made.step, read_ledger(tmp_path).steps_charged) == ([], 0, 1)


def test_the_ledger_does_not_confirm_a_guess_of_the_data(tmp_path):
    """Everything but the key is the same and known: were the sum hashed by itself, the ledger would say so."""
    tags = []
    for seed in (5, 6):
        made = trainer(plan_of(batch_size=USERS))
        made.make_step(curator(tmp_path / str(seed), made.plan, keys=Keys(seed)))
        tags.append(read_ledger(tmp_path / str(seed)).entries[0].tag)
    assert tags[0] != tags[1]


def test_a_trainer_of_another_plan_gets_no_answer(tmp_path):
    made = trainer()
    with pytest.raises(PrivacyError, match="the ledger is of another plan"):
        Curator(TRAIN, plan_of(epsilon=40), create_ledger(tmp_path, made.plan), Keys(5))
    releasing = plan_of(shares={"histogram": 0.1})
    with pytest.raises(PrivacyError, match="not the next of the plan, 'histogram'"):
        made.make_step(curator(tmp_path / "other", releasing))


def test_the_learning_rate_rises_and_falls(tmp_path, monkeypatch):
    plan = plan_of(batch_size=6, steps=10)
    made = trainer(plan, Optimisation(learning_rate=0.4, max_length=LENGTH))
    rates = []
    monkeypatch.setattr(made.optimizer, "step", rates.append)
    list(made.run(curator(tmp_path, plan)))
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05])

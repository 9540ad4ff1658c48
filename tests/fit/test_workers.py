"""Workers side by side: the same sum as one worker's and as the definition's, the same bits every time, nobody twice."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dpformer.clipping import PhantomClipping
from dpformer.fit import workers
from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.fit.workers import Team, Worker
from dpformer.models import Transformer, TransformerSpec
from dpformer.privacy import read_ledger
from tests.fit.test_step import (
    GRID,
    LENGTH,
    TRAIN,
    USERS,
    clipped_sum,
    curator,
    distance,
    flat,
    plan_of,
    sum_of,
    trainer,
)

Threads = Callable[[int], None]
EVERYBODY = np.arange(USERS)
ask = torch.get_num_threads  # itself, whatever it is made to say below


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """As if torch had two threads, or as many as are said. It keeps its one: other tests fork, which OpenMP's do not survive."""

    def say(count: int) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)

    say(2)
    monkeypatch.setattr(workers, "FEW", 0)
    return say


def hand(made: Trainer, worker: Worker) -> None:
    """Let this worker be the first of the team."""
    made.query.team = Team(worker, 1000)


class Noted(Worker):
    """A worker that keeps a list of the micro-batches it had; a second worker is a plain one."""

    def __init__(self, made: Trainer) -> None:
        super().__init__(made.model, made.worker.clipping)
        self.had: list[list[int]] = []
        self.sizes: list[int] = []

    def add(self, batch, masks=None):
        self.had.append(batch.users.tolist())
        self.sizes.append(batch.tokens.numel())
        return super().add(batch, masks)


@pytest.mark.parametrize("model", ["transformer", "gru"])
@pytest.mark.parametrize("epsilon", [50, math.inf])
@pytest.mark.parametrize("users", [EVERYBODY, np.array([1, 2]), np.array([5, 9]), EVERYBODY[:0]])
def test_two_workers_sum_what_the_definition_says(model, epsilon, users):
    made = trainer(plan_of(epsilon=epsilon), model=model)
    assert made.query.team.size == 2
    found, expected = sum_of(made, users), clipped_sum(made, users)
    off = np.abs(flat(found) - flat(expected) / GRID)
    assert off.max() <= 3 / 2 + len(users) * 2e-6 / GRID  # half a step for each group, and the slack of the clipping


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_part_is_seen(lost):
    class Forgetful(Team):
        def sum(self, parts, grid, masks):
            return super().sum([[] if k == lost else part for k, part in enumerate(parts)], grid, masks)

    made = trainer()
    made.query.team = Forgetful(made.worker, 1000)
    found = {name: value * GRID for name, value in sum_of(made, EVERYBODY).items()}
    assert distance(found, clipped_sum(made, EVERYBODY)) > 1e-2


def test_one_worker_or_two_whatever_the_threads_give_the_same_sum_but_for_rounding(threads):
    """Micro-batches of two workers are smaller: a group's sum may round to another whole step, and to no other than the next."""
    sums = []
    for count in (1, 2, 4):
        threads(count)
        made = trainer()
        sums.append(flat(sum_of(made, EVERYBODY)))
        assert made.query.team.size == min(2, count)
    for other in sums[1:]:
        assert np.abs(other - sums[0]).max() <= 3  # one for each group


def test_the_same_bits_every_time_and_everybody_once(tmp_path):
    plan = plan_of(batch_size=USERS, steps=5)
    results = []
    for name in ("one", "other"):
        made, asker = trainer(plan), curator(tmp_path / name, plan)
        first = Noted(made)
        hand(made, first)
        for report in made.run(asker):
            results.append((report.loss, *(p.detach().clone() for p in made.model.parameters())))
            mine = [user for batch in first.had for user in batch]
            # The second worker has the odd groups; a person with a single item is in none.
            assert sorted(mine) == [n for n in EVERYBODY if len(TRAIN[n]) > 1 and n // 4 % 2 == 0]
            first.had.clear()
    for one, other in zip(results[:5], results[5:], strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def test_weights_that_change_between_steps_are_those_of_all_workers(tmp_path):
    """A vocabulary that is chosen, weights that are loaded or changed in place or replaced: nothing of the last step is left."""
    made = trainer(vocabulary=6)
    made.make_step(curator(tmp_path, made.plan))
    p = torch.linspace(0.1, 1.0, 10, dtype=torch.float64)

    def choose() -> None:
        made.model.choose(p, bias=False)
        made.query.forget_vocabulary()

    for change in (
        choose,
        lambda: made.take({name: value * 0.7 for name, value in made.model.state_dict().items() if "chosen" not in name}
                          | {"chosen": made.model.chosen}),
        lambda: made.model.table.data.mul_(1.5),
        lambda: setattr(made.model.norm.weight, "data", torch.full_like(made.model.norm.weight, 0.5)),
    ):  # fmt: skip
        change()
        made.query.team.size = 2
        by_two = flat(sum_of(made, EVERYBODY))
        made.query.team.size = 1
        assert np.abs(flat(sum_of(made, EVERYBODY)) - by_two).max() <= 3  # a step for each group


def test_who_is_not_finite_is_counted_once(threads):
    counts = []
    for count in (1, 2):
        threads(count)
        made = trainer()
        made.model.embedding.weight.data[3] = torch.nan
        # The tied table is in everybody's softmax: an item that is read but not predicted shows the count.
        made.model.output_bias[3] = -torch.inf
        sum_of(made, EVERYBODY)
        counts.append(made.query.report.nonfinite)
    assert counts[0] == counts[1] > 0


def test_an_error_in_one_worker_ends_the_step_with_nothing_spent(tmp_path):
    class Broken(Team):
        """Its second worker fails."""

        def _other(self, k):
            worker = super()._other(k)
            worker.add = lambda batch, masks=None: 1 / 0
            return worker

    made = trainer()
    asker = curator(tmp_path, made.plan)
    made.make_step(asker)
    plain, first = made.query.team, Noted(made)
    made.query.team = Broken(first, 1000)
    with pytest.raises(ZeroDivisionError):
        made.make_step(asker)
    assert first.had  # it was not cut off
    assert read_ledger(tmp_path).steps_charged == 1
    made.query.team = plain
    made.make_step(asker)


@pytest.mark.parametrize("how", ["two", "a thread", "few positions", "a large table"])
def test_one_worker_where_two_would_not_do(how, monkeypatch, threads):
    torch.manual_seed(0)
    model = Transformer(TransformerSpec(items=9, max_length=LENGTH, d=8))
    if how == "a thread":
        threads(1)
    if how == "few positions":
        monkeypatch.setattr(workers, "FEW", 100)
    if how == "a large table":
        model = Transformer(TransformerSpec(items=90, max_length=LENGTH, d=8))
        monkeypatch.setattr(workers, "LARGE", 500)
    assert Team(Worker(model, PhantomClipping(model)), 100).size == (2 if how == "two" else 1)


def test_the_caller_keeps_its_threads_and_each_worker_has_its_share(threads):
    class Counted(Noted):
        def add(self, batch, masks=None):
            self.shares.append(ask())
            return super().add(batch, masks)

    made, before = trainer(), ask()
    first = Counted(made)
    hand(made, first)
    for count, share in ((4, 2), (2, 1)):
        threads(count)
        first.shares = []
        sum_of(made, EVERYBODY)
        assert ask() == before
        assert set(first.shares) == {share}


def test_two_workers_hold_no_more_of_a_batch_than_one(threads):
    for count, most in ((1, 24), (2, 12)):
        threads(count)
        made = trainer(how=Optimisation(max_length=LENGTH, token_budget=24), block=USERS)
        first = Noted(made)
        hand(made, first)
        sum_of(made, EVERYBODY)
        assert 6 <= max(first.sizes) <= most

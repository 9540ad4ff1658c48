"""Workers side by side: the same sum as one worker's and as the definition's, the same bits every time, nobody twice."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from dpformer.clipping import PhantomClipping
from dpformer.models.transformer import Transformer
from dpformer.privacy import make_plan, read_ledger
from dpformer.training import workers
from dpformer.training.trainer import Optimisation, Trainer
from dpformer.training.workers import Team, Worker
from tests.training.test_step import (
    LENGTH,
    USERS,
    distance,
    expected_gradient,
    gradient_of_step,
    next_batch,
    trainer,
)

Threads = Callable[[int], None]
ask = torch.get_num_threads  # itself, whatever it is made to say below


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """As if torch had two threads, or as many as are said. It keeps its one: other tests fork, which OpenMP's do not survive."""

    def say(count: int) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)

    say(2)
    monkeypatch.setattr(workers, "FEW", 0)
    return say


def two(made: Trainer) -> bool:
    """Whether the last step was made by two."""
    return len(made._team._others) == 1


@pytest.mark.parametrize("model", ["transformer", "gru"])
@pytest.mark.parametrize("epsilon", [50, float("inf")])
def test_two_workers_sum_what_the_definition_says(tmp_path, model, epsilon):
    plan = make_plan(USERS, epsilon, 1e-3, batch_size=USERS // 2, steps=6)
    made = trainer(tmp_path, plan, model=model)
    for _ in range(4):
        expected = expected_gradient(made, next_batch(made), plan.batch_size)
        assert distance(gradient_of_step(made), expected) < 1e-5
    assert two(made)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_part_is_seen(tmp_path, monkeypatch, lost):
    made = trainer(tmp_path)
    expected = expected_gradient(made, next_batch(made), made.plan.batch_size)
    real = Worker.add_all

    def forgetful(self, part):
        return 0.0 if (self is made.worker) == (lost == 0) else real(self, part)

    monkeypatch.setattr(Worker, "add_all", forgetful)
    assert distance(gradient_of_step(made), expected) > 1e-2


def test_the_same_bits_every_time_and_everybody_once(tmp_path, monkeypatch):
    seen = []
    real = Worker.add

    def noted(self, batch):
        seen.extend(batch.users.tolist())
        return real(self, batch)

    monkeypatch.setattr(Worker, "add", noted)
    plan = make_plan(USERS, 50, 1e-3, batch_size=USERS, steps=5)
    results = []
    for name in ("one", "other"):
        made = trainer(tmp_path / name, plan)
        for report in made.run():
            results.append((report.loss, *(p.detach().clone() for p in made.model.parameters())))
            paired = [n for n in range(USERS) if len(made.train[n]) > 1]
            assert sorted(seen) == paired
            seen.clear()
        assert two(made)
    for one, other in zip(results[:5], results[5:], strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def test_weights_that_change_between_steps_are_those_of_all_workers(tmp_path, threads):
    """A vocabulary that is chosen, weights that are loaded or changed in place or replaced: nothing of the last step is left."""
    made = trainer(tmp_path, vocabulary=6)
    made.make_step()
    p = torch.linspace(0.1, 1.0, 10, dtype=torch.float64)
    for change in (
        lambda: made.choose(p, bias=False),
        lambda: made.take({name: value * 0.7 for name, value in made.model.state_dict().items() if "chosen" not in name}
                          | {"chosen": made.model.chosen}),
        lambda: made.model.table.data.mul_(1.5),
        lambda: setattr(made.model.norm.weight, "data", torch.full_like(made.model.norm.weight, 0.5)),
    ):  # fmt: skip
        change()
        two_made = gradient_of_sum(made)
        threads(1)
        one_made = gradient_of_sum(made)
        threads(2)
        assert distance(two_made, one_made) < 1e-9
    assert two(made)


def gradient_of_sum(made: Trainer) -> dict[str, torch.Tensor]:
    for p in made.model.parameters():
        p.grad = torch.zeros_like(p)
    made._add_gradients(np.flatnonzero(made._sequences.lengths > 1))
    return {name: p.grad.clone() for name, p in made.model.named_parameters()}


def test_who_is_not_finite_is_counted_once(tmp_path, threads):
    counts = []
    for count in (1, 2):
        threads(count)
        made = trainer(tmp_path / str(count), make_plan(USERS, 50, 1e-3, batch_size=USERS, steps=2))
        made.model.embedding.weight.data[3] = torch.nan
        # The tied table is in everybody's softmax: an item that is read but not predicted shows the count.
        made.model.output_bias[3] = -torch.inf
        counts.append((made.make_step().nonfinite, made.clipping.nonfinite))
    assert counts[0] == counts[1]
    assert counts[0][0] > 0


def test_an_error_in_one_worker_ends_the_step_with_nothing_spent(tmp_path, monkeypatch):
    made = trainer(tmp_path)
    made.make_step()
    real, finished = Worker.add_all, []

    def broken(self, part):
        if self is not made.worker:
            raise ZeroDivisionError
        result = real(self, part)
        finished.append(self)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "add_all", broken)
        with pytest.raises(ZeroDivisionError):
            made.make_step()
    assert finished == [made.worker]
    assert read_ledger(tmp_path).steps_charged == 1
    made.make_step()


@pytest.mark.parametrize(
    "how", ["dropout", "a layer of dropout", "a thread", "a small batch", "few tokens", "a large table"]
)
def test_one_worker_where_two_would_not_do(how, monkeypatch, threads):
    torch.manual_seed(0)
    model = Transformer(9, LENGTH, d=8, dropout=0.1 if how == "dropout" else 0.0)
    if how == "a layer of dropout":
        model.more = nn.Dropout(0.2)
    if how == "a thread":
        threads(1)
    if how == "few tokens":
        monkeypatch.setattr(workers, "FEW", 100)
    if how == "a large table":
        model = Transformer(90, LENGTH, d=8)
        monkeypatch.setattr(workers, "LARGE", 500)
    team = Team(Worker(model, PhantomClipping(model)))
    assert team.size(8 if how == "a small batch" else 100, 16) == 1
    assert Team(Worker(Transformer(9, LENGTH, d=8), None)).size(101, 16) == (1 if how == "a thread" else 2)


def test_the_caller_keeps_its_threads_and_each_worker_has_its_share(tmp_path, monkeypatch, threads):
    before, shares = ask(), []
    real = Worker.add_all
    monkeypatch.setattr(Worker, "add_all", lambda self, part: shares.append(ask()) or real(self, part))
    made = trainer(tmp_path)
    threads(4)
    made.make_step()
    assert (ask(), shares) == (before, [2, 2])
    threads(2)
    made.make_step()
    assert (ask(), shares[2:]) == (before, [1, 1])


def test_two_workers_hold_no_more_of_a_batch_than_one(tmp_path, monkeypatch, threads):
    sizes = {1: [], 2: []}
    real = workers.Worker.add
    plan = make_plan(USERS, 50, 1e-3, batch_size=USERS, steps=1)
    for count, found in sizes.items():
        threads(count)
        how = Optimisation(max_length=LENGTH, token_budget=24)
        monkeypatch.setattr(Worker, "add", lambda self, b, found=found: found.append(b.tokens.numel()) or real(self, b))
        trainer(tmp_path / str(count), plan, how=how).make_step()
    assert max(sizes[1]) <= 24
    assert max(sizes[2]) <= 12

"""Several processes train the same model as one, and state the same."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.lead_and_follow import follow
from dpformer.fit.run import resume
from dpformer.fit.workers import Team, Worker
from dpformer.privacy import Curator, read_ledger
from dpformer.privacy.noise import rounded_gaussian
from dpformer.training.groups import Groups
from dpformer.training.ranks import SINGLE, Ranks
from tests.distributed.conftest import begun, copied, fork_ranks, train_on
from tests.recipes import small_recipe

# Sums of some dozen float32 numbers of size 1 in another order, through ten steps of Adam at rate 0.01.
TOLERANCE = 1e-5
KINDS = {
    "transformer": {"reattention": "logits"},
    "accumulated": {"reattention": "accumulated"},
    "gru": {"model": "gru"},
    "pure": {"vocabulary": 7, "recency": 0.8, "batch_size": 60},
    "not private": {"epsilon": float("inf")},
}


def assert_close(folder: Path, whole: Path, tolerance: float = TOLERANCE) -> None:
    found, expected = (load_file(place / "model.safetensors") for place in (folder, whole))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("transformer", 2), ("transformer", 4), ("accumulated", 2), ("gru", 2), ("pure", 2), ("not private", 2)],
)
def test_the_model_and_the_statement_are_those_of_one_process(kind, size, tmp_path, loaded):
    several = begun(tmp_path / "several", loaded, small_recipe(**KINDS[kind]))
    one = copied(several, "one")
    assert resume(one).train()
    ended = fork_ranks(tmp_path / "ends", size, train_on(several))
    assert [(end.code, end.value, end.error) for end in ended] == [(0, True, "")] * size
    assert_close(several, one)
    statements = [json.loads((folder / "privacy.json").read_text()) for folder in (several, one)]
    for statement in statements:
        statement.pop("ledger", None)  # the run's id and hashes
    assert statements[0] == statements[1]
    events = [[json.loads(line) for line in (folder / "events.jsonl").open()] for folder in (several, one)]
    np.testing.assert_allclose(*[[event["loss"] for event in some] for some in events], rtol=1e-4)
    assert not (several / "private").exists()


@pytest.mark.parametrize("team", [1, 2])
def test_uneven_and_empty_ranks_and_a_user_who_is_not_finite(team, tmp_path, loaded):
    """Batches of nobody, of fewer people than processes (or than their workers), of people without a pair, of everybody."""
    several = begun(tmp_path / "several", loaded, small_recipe())
    one = copied(several, "one")
    draws = [np.arange(0), np.array([7]), np.array([0]), np.array([3, 9]), np.arange(60), np.array([0, 1, 2, 3, 4])]

    class Broken(Worker):
        """Whoever begins with item 3 has a loss that is not a number."""

        def losses(self, tokens):
            return super().losses(tokens) * torch.where(tokens[:, 0] == 3, torch.nan, 1.0)

    class BrokenTeam(Team):
        def _other(self, k):
            other = super()._other(k)
            return Broken(other.model, other.clipping)

    def prepare(query: GradientSum) -> None:
        query.team = BrokenTeam(Broken(query.model, query.team.first.clipping), 1)
        query.team.size = team
        query.groups = Groups(7, 7)

    def lead(folder: Path, ranks: Ranks = SINGLE) -> list[float]:
        left = iter(draws)
        given = partial(Curator, draw=lambda key, users, rate: next(left))
        run = resume(folder, ranks=ranks, make_curator=given)
        prepare(run.trainer.query)
        reports, weights = [], []
        for _ in draws:
            weights = weights_of(run.trainer.query)
            reports.append(run.trainer.make_step(run.curator))
        ranks.broadcast({"released": False})
        return [*weights, *weights_of(run.trainer.query), *(report.nonfinite for report in reports)]

    def work(ranks: Ranks) -> list[float]:
        if ranks.first:
            return lead(several, ranks)
        follower = follow(ranks)
        prepare(follower.query)
        assert not follower.train()
        return weights_of(follower.query)

    expected = lead(one)
    assert sum(expected[-len(draws) :]) > 0
    ended = fork_ranks(tmp_path / "ends", 4, work)
    assert [end.error for end in ended] == [""] * 4
    np.testing.assert_allclose(ended[0].value, expected, rtol=0, atol=TOLERANCE)
    for end in ended[1:]:
        assert end.value == ended[0].value[: len(end.value)]  # rank 0 has sent those of the last sum


def weights_of(query: GradientSum) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in query.model.parameters()]).tolist()


@pytest.mark.parametrize("defect", [False, True])
def test_noise_is_added_once(defect, tmp_path, loaded, monkeypatch):
    """Answer less sum, over the plan's std: its square has mean 1 over P values (std sqrt(2 / P)); 2 with the defect.

    The control: every process adds noise to its part. Five standard deviations: 1 in 2 million.
    """
    recipe = small_recipe(batch_size=60, epochs=10.0, seed=None, d=32)
    several = begun(tmp_path / "several", loaded, recipe)
    plain = Ranks.sum_to_first_

    def without_noise(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        return np.zeros(shape, dtype=np.int64)

    one = resume(copied(several, "one"), make_curator=partial(Curator, noise=without_noise))
    query, noiseless = one.trainer.query, one.curator.ask(one.trainer.query)
    std, grid = noiseless.noise_std, noiseless.grid
    one.close()
    assert std == pytest.approx(one.plan.noise_multiplier * query.sensitivity(grid) * grid)
    names = [name for name, _ in one.trainer.model.named_parameters()]
    expected = np.concatenate([noiseless.values[name].reshape(-1) for name in names])

    def noisy(self, tensors):
        if defect and not self.first:
            for k, tensor in enumerate(tensors):
                tensor += torch.from_numpy(rounded_gaussian(bytes([k]) * 32, tuple(tensor.shape), std / grid))
        plain(self, tensors)

    monkeypatch.setattr(Ranks, "sum_to_first_", noisy)

    def work(ranks: Ranks) -> list[float]:
        if ranks.first:
            run = resume(several, ranks=ranks)
            run.trainer.make_step(run.curator)
            ranks.broadcast({"released": False})
            gradients = torch.cat([p.grad.reshape(-1) for p in run.trainer.model.parameters()])
            return (gradients * run.plan.batch_size).tolist()
        follow(ranks).train()
        return []

    ended = fork_ranks(tmp_path / "ends", 2, work)
    assert [end.error for end in ended] == ["", ""]
    z = (np.array(ended[0].value) - expected) / std
    scale, spread = float(np.mean(z**2)), (2 / len(z)) ** 0.5
    assert len(z) > 3000
    assert (abs(scale - 1) < 5 * spread) is not defect
    if defect:
        assert abs(scale - 2) < 10 * spread
    assert read_ledger(several).steps_charged == 1


def test_a_run_goes_on_with_another_number_of_processes(tmp_path, loaded):
    """Stopped by one that does not lead, everybody stops after the same step. Sums are whole numbers, dropout is by the person:
    one process, three, or as many as before make the same model of it, and the ledger takes their sums.
    """
    whole = begun(tmp_path / "whole", loaded, small_recipe(dropout=0.3))
    cut = copied(whole, "cut")
    assert all(end.code == 0 for end in fork_ranks(tmp_path / "ends", 2, train_on(whole)))

    def stopped(ranks: Ranks) -> list[object]:
        if not ranks.first:
            wishes = iter([False, False, False, True])
            return [follow(ranks).train(lambda: next(wishes)), 4 - len(list(wishes))]
        run = resume(cut, ranks=ranks)
        return [run.train(), run.step]

    assert [end.value for end in fork_ranks(tmp_path / "ends", 2, stopped)] == [[False, 4]] * 2
    alone, three = copied(cut, "alone"), copied(cut, "three")
    assert all(end.code == 0 for end in fork_ranks(tmp_path / "ends", 2, train_on(cut)))
    assert all(end.code == 0 for end in fork_ranks(tmp_path / "ends", 3, train_on(three)))
    assert resume(alone).train()
    for folder in (cut, alone, three):
        assert_close(folder, whole)
        assert read_ledger(folder).entries[:5] == read_ledger(whole).entries[:5]
    # The same number of processes: the same program on the same numbers.
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert read_ledger(cut).entries == read_ledger(whole).entries

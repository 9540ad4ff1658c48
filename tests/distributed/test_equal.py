"""Several processes train the same model as one, and state the same."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpformer.privacy import noise_source, read_ledger
from dpformer.training.ranks import Ranks
from dpformer.training.run import resume
from dpformer.training.together import follow
from dpformer.training.trainer import Trainer
from dpformer.training.workers import Team, Worker
from tests.distributed.conftest import begun, copied, fork_ranks, small_recipe, train_on

# Sums of some dozen float32 numbers of size 1 in another order, through ten steps of Adam at rate 0.01.
TOLERANCE = 1e-5
KINDS = {
    "transformer": {"reattention": "logits", "averaging": "ema"},
    "gru": {"model": "gru"},
    "pure": {"vocabulary": 7, "popularity_bias": True, "recency": 0.8, "identity": True, "batch_size": 60},
    "not private": {"epsilon": float("inf")},
}


def assert_close(folder: Path, whole: Path, tolerance: float = TOLERANCE) -> None:
    found, expected = (load_file(place / "model.safetensors") for place in (folder, whole))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("kind", "size"), [("transformer", 2), ("transformer", 4), ("gru", 2), ("pure", 2), ("not private", 2)]
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
def test_uneven_and_empty_ranks_and_a_user_who_is_not_finite(team, tmp_path, loaded, monkeypatch):
    """Batches of nobody, of fewer people than processes (or than their workers), of people without a pair, of everybody."""
    several = begun(tmp_path / "several", loaded, small_recipe())
    one = copied(several, "one")
    draws = [np.arange(0), np.array([7]), np.array([0]), np.array([3, 9]), np.arange(60), np.array([0, 1, 2, 3, 4])]
    plain = Worker.losses

    def losses(self, tokens):
        """Whoever begins with item 3 has a loss that is not a number."""
        value = plain(self, tokens)
        return value * torch.where(tokens[:, 0] == 3, torch.nan, 1.0)

    monkeypatch.setattr(Worker, "losses", losses)

    def steps(trainer: Trainer) -> list[float]:
        left = iter(draws)
        if trainer.sampler is not None:
            trainer.sampler.draw = lambda: next(left)
        reports = [trainer.make_step() for _ in draws]
        weights = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
        return [*weights.tolist(), *([report.nonfinite for report in reports] if trainer.sampler else [])]

    def work(ranks: Ranks) -> list[float]:
        trainer = (resume(several, ranks=ranks) if ranks.first else follow(ranks)).trainer
        return steps(trainer)

    expected = steps(resume(one).trainer)
    monkeypatch.setattr(Team, "size", lambda self, tokens, budget: team)
    assert sum(expected[-len(draws) :]) > 0
    ended = fork_ranks(tmp_path / "ends", 4, work)
    assert [end.error for end in ended] == [""] * 4
    np.testing.assert_allclose(ended[0].value, expected, rtol=0, atol=TOLERANCE)
    for end in ended[1:]:
        assert end.value == ended[0].value[: len(end.value)]  # to the bit


@pytest.mark.parametrize("defect", [False, True])
def test_noise_is_added_once(defect, tmp_path, loaded, monkeypatch):
    """Sum with noise less sum without, over sigma C: its square has mean 1 over P values (std sqrt(2 / P)); 2 with the defect."""
    recipe = small_recipe(batch_size=60, epochs=10.0, noise="system", seed=None, d=32)
    several = begun(tmp_path / "several", loaded, recipe)
    one = resume(copied(several, "one"))
    std = one.plan.noise_std(recipe.max_norm)
    without: list[torch.Tensor] = []
    monkeypatch.setattr(one.trainer.noise, "add_noise_", lambda named, std: without.extend(g.clone() for _, g in named))
    one.trainer.make_step()
    plain = Ranks.sum_to_first_

    def noisy(self, tensors):
        if defect and not self.first:
            noise_source().add_noise_([(str(k), value) for k, value in enumerate(tensors)], std)
        plain(self, tensors)

    monkeypatch.setattr(Ranks, "sum_to_first_", noisy)

    def work(ranks: Ranks) -> list[float]:
        trainer = (resume(several, ranks=ranks) if ranks.first else follow(ranks)).trainer
        trainer.make_step()
        return (torch.cat([p.grad.reshape(-1) for p in trainer.model.parameters()]) * trainer.plan.batch_size).tolist()

    ended = fork_ranks(tmp_path / "ends", 2, work)
    assert ended[0].value == ended[1].value
    z = (np.array(ended[0].value) - torch.cat([value.reshape(-1) for value in without]).numpy()) / std
    scale, spread = float(np.mean(z**2)), (2 / len(z)) ** 0.5
    assert len(z) > 3000
    assert (abs(scale - 1) < 5 * spread) is not defect
    if defect:
        assert abs(scale - 2) < 10 * spread
    assert read_ledger(several).steps_charged == 1


def test_dropout_differs_between_ranks_and_is_the_same_in_a_resumed_run(tmp_path, loaded):
    """Stopped by one that does not lead, everybody stops after the same step; then on to the same bits."""
    whole = begun(tmp_path / "whole", loaded, small_recipe(dropout=0.3))
    cut = copied(whole, "cut")
    assert all(end.code == 0 for end in fork_ranks(tmp_path / "ends", 2, train_on(whole)))

    def stopped(ranks: Ranks) -> list[object]:
        if not ranks.first:
            follower = follow(ranks)
            return [follower.train(lambda: follower.trainer.step == 4), follower.trainer.step]
        run = resume(cut, ranks=ranks)
        return [run.train(), run.step]

    assert [end.value for end in fork_ranks(tmp_path / "ends", 2, stopped)] == [[False, 4]] * 2
    assert all(end.code == 0 for end in fork_ranks(tmp_path / "ends", 2, train_on(cut)))
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (cut / "events.jsonl").read_bytes() == (whole / "events.jsonl").read_bytes()
    assert read_ledger(cut).entries == read_ledger(whole).entries

    def masks(ranks: Ranks) -> list[float]:
        trainer = (resume(copied(whole, "none"), ranks=ranks) if ranks.first else follow(ranks)).trainer
        with trainer._own_dropout(1):
            return torch.nn.functional.dropout(torch.ones(50), 0.5).tolist()

    begun(tmp_path / "other", loaded, small_recipe(dropout=0.3))
    whole = tmp_path / "other"
    first, second = (end.value for end in fork_ranks(tmp_path / "ends", 2, masks))
    assert first != second

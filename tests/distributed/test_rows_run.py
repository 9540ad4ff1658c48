"""Runs whose item tables are split over ranks: released whole, gone on with to the last bit, honest about what was spent."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpformer.errors import DPFormerError
from dpformer.privacy import read_ledger
from dpformer.training.ranks import ALONE, Ranks
from dpformer.training.released import load_model
from dpformer.training.rows import RowNoise
from dpformer.training.run import resume
from dpformer.training.session import begin
from dpformer.training.together import follow
from tests.distributed.conftest import copied, fork_ranks, small_recipe, train_on

RECIPE = small_recipe(vocabulary=11, popularity_bias=True, histogram_share=0.1, dropout=0.2)


def fit(folder: Path, data: Path, recipe=RECIPE, stop_at: int = 0):
    """`fit --split-items`; told to stop after a step, if one is given."""

    def work(ranks: Ranks):
        if not ranks.first:
            follower = follow(ranks)
            return follower.train()
        run = begin(folder, data, recipe, ranks, split=True)
        try:
            return run.train(should_stop=lambda: run.step == stop_at, checkpoint_seconds=0.0)
        finally:
            run.close()

    return work


@pytest.fixture
def whole(tmp_path, loaded) -> Path:
    """Two processes, uninterrupted."""
    ended = fork_ranks(tmp_path / "ends", 2, fit(tmp_path / "whole", loaded))
    assert [(end.error, end.value) for end in ended] == [("", True)] * 2
    return tmp_path / "whole"


def same(folder: Path, other: Path) -> bool:
    return (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_the_released_model_is_whole(whole, loaded):
    released = load_model(whole)
    assert released.model.table.shape == (12, 8)
    assert bool((released.model.table != 0).all())
    account = read_ledger(whole)
    assert (account.steps_charged, account.released) == (10, {"histogram"})
    assert not (whole / "private").exists()


def test_stopped_and_killed_runs_go_on_to_the_same_bits(whole, loaded, tmp_path, monkeypatch):
    """Told to stop after a step; and a rank killed when it has drawn noise for a step that was charged."""
    stopped, killed = tmp_path / "stopped", tmp_path / "killed"
    ended = fork_ranks(tmp_path / "ends", 2, fit(stopped, loaded, stop_at=4))
    assert [end.value for end in ended] == [False, False]
    add = RowNoise.add_noise_

    def die(self, gradients, std):
        add(self, gradients, std)
        if self.ranks.rank == 1 and read_ledger(killed).steps_charged == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(RowNoise, "add_noise_", die)
        ended = fork_ranks(tmp_path / "ends", 2, fit(killed, loaded))
    assert ended[1].code == -signal.SIGKILL
    assert "RankError" in ended[0].error
    assert f"torchrun ... -m dpformer resume {killed}" in ended[0].error
    assert read_ledger(killed).steps_charged == 6
    with pytest.raises(DPFormerError, match="split over 2 processes, and now there are 1"):
        resume(copied(stopped, "alone"))
    for folder in (stopped, killed):
        ended = fork_ranks(tmp_path / "ends", 2, train_on(folder))
        assert [end.error for end in ended] == ["", ""]
        assert same(folder, whole)
        assert [entry.what for entry in read_ledger(folder).entries] == [
            entry.what for entry in read_ledger(whole).entries
        ]


def test_a_damaged_part_of_a_checkpoint_is_not_used(loaded, tmp_path):
    folder = tmp_path / "run"
    fork_ranks(tmp_path / "ends", 2, fit(folder, loaded, stop_at=3))
    (part,) = folder.glob("private/checkpoint-*/state-00001")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    ended = fork_ranks(tmp_path / "ends", 2, train_on(folder))
    assert "sha256 of state-00001 differs" in ended[0].error


def test_without_privacy_it_is_the_run_of_one_process(loaded, tmp_path):
    """No noise: three processes with a third of the rows each end where one does, to rounding."""
    recipe = small_recipe(epsilon=float("inf"), noise="system", seed=None, averaging="none", histogram_share=0.1)
    recipe = recipe.model_copy(update={"seed": 1})
    ended = fork_ranks(tmp_path / "ends", 3, fit(tmp_path / "split", loaded, recipe))
    assert [end.error for end in ended] == [""] * 3
    run = begin(tmp_path / "one", loaded, recipe)
    run.train()
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("split", "one"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)
    assert not np.array_equal(found["model.embedding.weight"], torch.zeros(1))


def test_what_cannot_be_split_is_refused_before_anything_is_spent(loaded, tmp_path):
    with pytest.raises(
        DPFormerError, match="--split-items splits the item tables over the processes of torchrun, and there is one"
    ):
        begin(tmp_path / "a", loaded, RECIPE, ALONE, split=True)
    with pytest.raises(DPFormerError, match="'popularity' has no item tables to split"):
        begin(tmp_path / "a", loaded, small_recipe(model="popularity"), ALONE, split=True)
    ended = fork_ranks(tmp_path / "ends", 3, fit(tmp_path / "a", loaded, RECIPE.model_copy(update={"vocabulary": 2})))
    assert "2 items cannot be split over 3 processes; start at most 2" in ended[0].error
    assert [end.error for end in ended[1:]] == ["LeaderError: rank 0 cannot go on; it says why"] * 2
    assert not (tmp_path / "a").exists()

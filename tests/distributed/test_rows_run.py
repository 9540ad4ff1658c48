"""Runs whose item tables are split over ranks: released whole, gone on with to the last bit, honest about what was spent."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dpformer.errors import DPFormerError
from dpformer.privacy import plan as plan_module
from dpformer.privacy import read_ledger
from dpformer.privacy import statement as statement_module
from dpformer.training.ranks import ALONE, Ranks
from dpformer.training.recipe import Recipe, make_recipe
from dpformer.training.released import load_model
from dpformer.training.rows import RowNoise
from dpformer.training.run import resume
from dpformer.training.session import begin, go_on
from dpformer.training.together import follow
from tests.distributed.processes import together
from tests.training.conftest import data, quick_accounting, small_recipe  # noqa: F401

RECIPE = small_recipe(vocabulary=11, popularity_bias=True, histogram_share=0.1, dropout=0.2)
# A seed for the start and the batches, and no noise for it to be insecure of.
PLAIN = small_recipe(epsilon=float("inf"), averaging="none", learning_rate=1e-3)


def ranks_of(rank: int, size: int) -> Ranks:
    """In a new process: who it is; and the accounting, computed once for each question."""
    for module, name in [(plan_module, "epsilon"), (statement_module, "epsilon"), (statement_module, "attack_bound")]:
        setattr(module, name, functools.cache(getattr(module, name)))
    return Ranks(rank, size, tensors=dist.group.WORLD, words=dist.group.WORLD)


def train(ranks: Ranks, open_run: Any, stop_at: int = 0) -> bool:
    """As the command does: rank 0 opens the run, the others follow."""
    if not ranks.first:
        follower = follow(ranks)
        assert follower is not None
        return follower.train()
    run = open_run()
    try:
        return run.train(should_stop=lambda: run.step == stop_at, checkpoint_seconds=0.0)
    finally:
        run.close()


def several(rank: int, size: int, place: str, data: str) -> dict[str, Any]:  # noqa: F811
    """One training after the other, by the same processes."""
    ranks, folder = ranks_of(rank, size), Path(place)

    def fit(name: str, recipe: Recipe = RECIPE, stop_at: int = 0) -> bool:
        return train(ranks, lambda: begin(folder / name, Path(data), recipe, ranks, split=True), stop_at)

    found: dict[str, Any] = {"whole": fit("whole"), "stopped": fit("stopped", stop_at=4)}
    if ranks.first:
        shutil.copytree(folder / "stopped", folder / "damaged")
        (part,) = (folder / "damaged").glob("private/checkpoint-*/state-00001")
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    found["resumed"] = train(ranks, lambda: go_on(folder / "stopped", ranks=ranks))
    found["plain"] = fit("plain", PLAIN)
    for name, call in {
        "few": lambda: fit("few", RECIPE.model_copy(update={"vocabulary": 1})),
        "damaged": lambda: train(ranks, lambda: go_on(folder / "damaged", ranks=ranks)),
    }.items():
        with pytest.raises(DPFormerError) as caught:
            call()
        found[name] = str(caught.value)
    return found


def killed_in_a_step(rank: int, size: int, folder: str, data: str) -> None:  # noqa: F811
    """Rank 1 dies when it has drawn noise for a step that was charged, its sixth."""
    ranks, add, made = ranks_of(rank, size), RowNoise.add_noise_, []

    def die(self: RowNoise, gradients: Any, std: float) -> None:
        add(self, gradients, std)
        made.append(std)
        if self.ranks.rank == 1 and len(made) == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    RowNoise.add_noise_ = die  # type: ignore[method-assign]
    train(ranks, lambda: begin(Path(folder), Path(data), RECIPE, ranks, split=True))


def resumed(rank: int, size: int, folder: str) -> bool:
    ranks = ranks_of(rank, size)
    return train(ranks, lambda: go_on(Path(folder), ranks=ranks))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def ended(place: Path, data: Path) -> list[dict[str, Any]]:  # noqa: F811
    return together(2, several, str(place), str(data))


def same(folder: Path, other: Path) -> bool:
    charged = [[entry.what for entry in read_ledger(run).entries] for run in (folder, other)]
    models = [(run / "model.safetensors").read_bytes() for run in (folder, other)]
    return charged[0] == charged[1] and models[0] == models[1]


def test_the_released_model_is_whole(ended, place):
    assert [found["whole"] for found in ended] == [True, True]
    table = load_model(place / "whole").model.table
    assert table.shape == (12, 8)
    assert bool((table != 0).all())
    account = read_ledger(place / "whole")
    assert (account.steps_charged, account.released) == (10, {"histogram"})
    assert not (place / "whole" / "private").exists()


def test_a_stopped_run_goes_on_to_the_same_bits(ended, place):
    assert [(found["stopped"], found["resumed"]) for found in ended] == [(False, True)] * 2
    assert same(place / "stopped", place / "whole")


def test_a_killed_rank_ends_the_run_and_what_was_charged_is_made_again(ended, place, data):  # noqa: F811
    folder = place / "killed"
    (_, error), (code, _) = together(2, killed_in_a_step, str(folder), str(data), failing=True)
    assert code == -signal.SIGKILL
    assert f"torchrun ... -m dpformer resume {folder}" in error
    assert read_ledger(folder).steps_charged in (6, 7)
    with pytest.raises(DPFormerError, match="split over 2 processes, and now there are 1"):
        resume(folder)
    assert together(2, resumed, str(folder)) == [True, True]
    assert same(folder, place / "whole")


def test_without_noise_it_is_the_run_of_one_process(ended, place, data):  # noqa: F811
    assert [found["plain"] for found in ended] == [True, True]
    begin(place / "one", data, PLAIN).train()
    found, expected = (load_file(place / name / "model.safetensors") for name in ("plain", "one"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_refusals(ended, data, tmp_path):  # noqa: F811
    assert "1 items cannot be split over 2 processes; start at most 1" in ended[0]["few"]
    assert "sha256 of state-00001 differs" in ended[0]["damaged"]
    assert ended[1]["few"] == ended[1]["damaged"] == "rank 0 cannot go on; it says why"
    with pytest.raises(DPFormerError, match="over the processes of torchrun, and there is one"):
        begin(tmp_path / "a", data, RECIPE, ALONE, split=True)
    with pytest.raises(DPFormerError, match="'popularity' has no item tables to split"):
        begin(tmp_path / "a", data, small_recipe(model="popularity"), ALONE, split=True)
    with pytest.raises(DPFormerError, match=r"a network that is distilled .* needs the whole table"):
        begin(tmp_path / "a", data, make_recipe("distilled", epsilon=20.0, delta=1e-3), Ranks(), split=True)
    assert not (tmp_path / "a").exists()

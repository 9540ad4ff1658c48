"""What rank 0 does alone, or before the steps: statistics and distilled networks. As one process does it, paid for once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpformer.fit import lead_and_follow
from dpformer.fit.lead_and_follow import follow
from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import resume, start
from dpformer.privacy import read_ledger
from dpformer.privacy.plan import GRADIENTS
from dpformer.training.ranks import Ranks
from tests.distributed.processes import ranks_of
from tests.distributed.processes import together as run_together
from tests.fit.conftest import data  # noqa: F401

BUDGET: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-3, "seed": 1}
SMALL: dict[str, Any] = {**BUDGET, "d": 8, "max_length": 6}
# Everybody is in every batch: a plan that needs no numerical accounting.
STEPS: dict[str, Any] = {**SMALL, "batch_size": 60, "epochs": 4.0}
ALL = [
    {"stage": "histogram"},
    {"stage": "transitions", "share": 0.4},
    {"stage": "distil", "steps": 2},
    {"stage": "dpsgd"},
]
RECIPES: dict[str, Recipe] = {
    "transitions": make_recipe("transitions", **BUDGET),
    "popularity": make_recipe("popularity", **BUDGET),
    "distilled": make_recipe("distilled", **{**SMALL, "distil.steps": 2}),
    "default": make_recipe("default", **STEPS),
    "distilled, then steps": make_recipe("default", stages=ALL, **STEPS),
}
WITHOUT_STEPS = ("transitions", "popularity", "distilled")


def fit(ranks: Ranks, open_run: Any) -> bool | None:
    """As the command does. None for a process that was not needed."""
    if not ranks.first:
        follower = follow(ranks)
        return None if follower is None else follower.train()
    run = open_run()
    try:
        return bool(run.train())
    finally:
        run.close()


def all_of_them(rank: int, size: int, place: str, data: str) -> list[bool | None]:  # noqa: F811
    ranks = ranks_of(rank, size)
    return [fit(ranks, lambda n=n, r=r: start(Path(place) / n, Path(data), r, ranks)) for n, r in RECIPES.items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


@pytest.fixture(scope="module")
def ended(place: Path, data: Path) -> list[list[bool | None]]:  # noqa: F811
    return run_together(2, all_of_them, str(place), str(data))


@pytest.mark.parametrize("kind", RECIPES)
def test_two_processes_release_what_one_does(kind, ended, place, data, tmp_path):  # noqa: F811
    # Without steps rank 0 needs nobody, and nobody waits for it.
    assert [found[list(RECIPES).index(kind)] for found in ended] == [True, None if kind in WITHOUT_STEPS else True]
    one = tmp_path / "one"
    assert start(one, data, RECIPES[kind]).train()
    several = place / kind
    found, expected = (load_file(run / "model.safetensors") for run in (several, one))
    assert found.keys() == expected.keys()
    tolerance = 0.0 if kind in WITHOUT_STEPS else 1e-5
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)
    accounts = [read_ledger(run) for run in (several, one)]
    assert [entry.name for entry in accounts[0].entries] == [entry.name for entry in accounts[1].entries]
    statements = [json.loads((run / "privacy.json").read_text()) for run in (several, one)]
    for statement in statements:
        del statement["ledger"]  # the run's id and hashes
    assert statements[0] == statements[1]
    assert not (several / "private").exists()


def lost_before(rank: int, size: int, folder: str, data: str) -> None:  # noqa: F811
    """Rank 1 ends when it is asked for its data."""
    ranks = ranks_of(rank, size)
    lead_and_follow._contents = lambda dataset: os.kill(os.getpid(), signal.SIGKILL) if rank else {}
    fit(ranks, lambda: start(Path(folder), Path(data), RECIPES["default"], ranks))


def lost_meanwhile(rank: int, size: int, folder: str, data: str) -> None:  # noqa: F811
    """Rank 1 ends while rank 0 asks for the transitions."""
    ranks = ranks_of(rank, size)
    broadcast = Ranks.broadcast

    def counted(self: Ranks, value: Any = None) -> Any:
        if rank and counted.calls == 1:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        counted.calls += 1  # type: ignore[attr-defined]
        return broadcast(self, value)

    counted.calls = 0  # type: ignore[attr-defined]
    Ranks.broadcast = counted  # type: ignore[method-assign]
    fit(ranks, lambda: start(Path(folder), Path(data), RECIPES["default"], ranks))


def resumed(rank: int, size: int, folder: str) -> bool | None:
    ranks = ranks_of(rank, size)
    return fit(ranks, lambda: resume(Path(folder), ranks=ranks))


def stopped(rank: int, size: int, folder: str, data: str) -> list[Any]:  # noqa: F811
    """Rank 0 is asked to stop after the histogram."""
    ranks = ranks_of(rank, size)
    if rank:
        return [follow(ranks) is None]
    run = start(Path(folder), Path(data), RECIPES["default"], ranks)
    seen: list[str] = []
    done = run.train(lambda progress: seen.append(progress.stage) if progress.done else None, lambda: bool(seen))
    run.close()
    return [done, *seen]


def test_a_stop_before_the_steps_ends_all_and_is_resumed(ended, place, data, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    assert run_together(2, stopped, str(folder), str(data)) == [[False, "histogram"], [True]]
    assert [entry.name for entry in read_ledger(folder).entries] == ["histogram"]
    assert run_together(2, resumed, str(folder)) == [True, True]
    assert read_ledger(folder).entries == read_ledger(place / "default").entries
    assert (folder / "model.safetensors").read_bytes() == (place / "default" / "model.safetensors").read_bytes()


def test_a_rank_lost_before_anything_was_begun(data, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    (_, error), (code, _) = run_together(2, lost_before, str(folder), str(data), failing=True)
    assert code == -signal.SIGKILL
    assert "rank 0 waited for rank 1 of 2, which has ended" in error
    assert "Nothing was begun or spent: start it again" in error
    assert not folder.exists()


def test_a_rank_lost_while_the_transitions_are_asked_for(ended, place, data, tmp_path):  # noqa: F811
    """What was released is in the ledger; going on makes it again with the same noise, and pays nothing more."""
    folder = tmp_path / "run"
    (_, error), (code, _) = run_together(2, lost_meanwhile, str(folder), str(data), failing=True)
    assert code == -signal.SIGKILL
    assert f"Go on with: dpformer resume {folder}, or under torchrun with any number of processes" in error
    charged = read_ledger(folder).entries
    assert [entry.name for entry in charged] == ["histogram", "transitions 1", "transitions 2", "transitions 3"]
    assert not any(entry.name == GRADIENTS for entry in charged)
    assert run_together(2, resumed, str(folder)) == [True, True]
    assert read_ledger(folder).entries == read_ledger(place / "default").entries
    assert (folder / "model.safetensors").read_bytes() == (place / "default" / "model.safetensors").read_bytes()

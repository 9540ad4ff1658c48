"""With a declared population a person may be absent from the data. Those behind move up, and change the groups of a step."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpformer.clipping import PhantomClipping
from dpformer.data import prepare, save
from dpformer.fit.run import start
from dpformer.privacy import Curator, Sample
from dpformer.training import PrivateTraining
from dpformer.training.groups import FLOAT32_SLACK, Groups
from dpformer.training.module_sum import ModuleSum
from dpformer.trust.verify import verify_run
from tests.fit.conftest import small_log
from tests.recipes import small_recipe

PEOPLE, BLOCK, NUMBERS, GRID = 40, 4, 64, 2.0**-4


def summed(people: np.ndarray, groups: Groups) -> np.ndarray:
    """The sum over all people, in steps of a grid so coarse that its rounding shows. A person's gradient is the person's row."""
    module = nn.Linear(NUMBERS, 1, bias=False)
    query = ModuleSum(module, PhantomClipping(module, 1e3, "flat"), groups, BLOCK)
    sample = Sample(np.arange(len(people)), b"")
    for places in query.start(sample, GRID):
        rows = torch.from_numpy(people[places]).float()
        query.add(lambda rows=rows: module(rows)[:, 0])
    return query.sum(None, sample, GRID)["weight"].ravel()


def test_one_who_is_absent_moves_the_rounding_of_all_groups_and_that_is_paid_for():
    random = np.random.default_rng(0)
    people = np.concatenate(
        [np.zeros((1, NUMBERS)), random.normal(size=(PEOPLE - 1, NUMBERS))]
    )  # the first adds nothing
    groups = Groups(BLOCK, BLOCK, PEOPLE // BLOCK)
    moved = float(np.linalg.norm(summed(people, groups) - summed(people[1:], groups)))
    assert moved > math.sqrt(NUMBERS)  # more than is paid for one group
    assert moved <= groups.touched * math.sqrt(NUMBERS)
    bound = 1.0 / GRID
    extra = groups.sensitivity(1.0, NUMBERS, GRID) - Groups(BLOCK, BLOCK).sensitivity(1.0, NUMBERS, GRID)
    assert extra == pytest.approx(9 * (math.sqrt(NUMBERS) + bound * BLOCK * FLOAT32_SLACK), rel=1e-9)


@pytest.mark.parametrize("declared", [False, True])
def test_groups_that_are_touched(declared):
    groups = Groups.of(10**6, 0.1, declared)
    assert groups.touched == (math.ceil(10**6 / groups.block) if declared else 1)
    assert groups.slack == 1e-6 + groups.touched * groups.most * 2.0**-21


class OneGroup(Curator[Any]):
    """Pays for the rounding of one group only, as before."""

    def ask(self, query: Any) -> Any:
        if hasattr(query, "groups"):
            query.groups = replace(query.groups, touched=1)
        return super().ask(query)


@pytest.fixture(scope="module")
def declared_run(tmp_path_factory):
    place = tmp_path_factory.mktemp("declared")
    save(prepare(small_log(users=60, items=12)), place / "data")
    recipe = small_recipe(population=100, batch_size=40, epochs=2.0, d=8, max_length=6)
    start(place / "run", place / "data", recipe).train()
    return place / "run"


def test_verify_measures_all_groups_and_finds_what_is_paid_for_one_only(declared_run):
    sound = verify_run(declared_run)
    assert sound.passed, sound.failed
    details = {check.name: check.detail for check in sound.checks}
    assert "in all groups left in turn" in details["float32 slack"]
    planted = verify_run(declared_run, make=OneGroup)
    assert "queries planned" in [check.name for check in planted.checks if check.status == "fail"]


def test_statement_of_a_loop_names_all_groups(tmp_path):
    model = nn.Linear(3, 1)
    data = [(torch.randn(3), torch.randn(1)) for _ in range(30)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-3, "batch_size": 10, "steps": 1}
    private = PrivateTraining(model, optimizer, data, **settings, population=50, run=tmp_path / "run")
    for x, y in private:
        private.step(lambda x=x, y=y: (model(x) - y).square()[:, 0])
    assert private.plan.declared
    assert "the others of all 2 groups" in private.statement.text()

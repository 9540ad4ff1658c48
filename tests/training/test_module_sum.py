"""The clipped sum of any module: against one person at a time in float64, and through the Curator."""

import numpy as np
import pytest
import torch
from torch import nn

from dpformer import PhantomClipping
from dpformer.errors import PrivacyError
from dpformer.models.dropout import Dropout
from dpformer.privacy import Curator, Keys, Sample, create_ledger, make_plan
from dpformer.privacy.query import grid_step
from dpformer.training.groups import Groups
from dpformer.training.module_sum import ModuleSum
from tests.training.support import PEOPLE, losses, small_model

PLAN = make_plan(PEOPLE, 8.0, 1e-3, batch_size=30, steps=3)
GROUPS = Groups(20, 20)
EVERYBODY = Sample(np.arange(PEOPLE), bytes(32))


def query_of(module: nn.Module, micro_batch: int = 7) -> ModuleSum:
    return ModuleSum(module, PhantomClipping(module, 0.5, "flat"), GROUPS, micro_batch)


def add_all(query: ModuleSum, people: torch.Tensor, sample: Sample, grid: float) -> list[np.ndarray]:
    parts = query.start(sample, grid)
    for part in parts:
        query.add(lambda part=part: losses(query.module, (part, people[torch.from_numpy(part)])))
    return parts


def whole(query: ModuleSum, people: torch.Tensor, sample: Sample, grid: float) -> dict[str, np.ndarray]:
    add_all(query, people, sample, grid)
    return dict(query.sum(people, sample, grid))


def one_at_a_time(module: nn.Module, people: torch.Tensor, drawn: np.ndarray, max_norm: float) -> dict[str, np.ndarray]:
    """sum of min(1, C / |g|) g by plain autograd in float64."""
    exact = small_model(double=True)
    exact.load_state_dict(module.state_dict())
    total = {name: torch.zeros_like(p) for name, p in exact.named_parameters()}
    for k in drawn:
        loss = losses(exact, (k, people[[int(k)]].double())).sum()
        gradients = torch.autograd.grad(loss, list(exact.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        for (name, _), g in zip(exact.named_parameters(), gradients, strict=True):
            total[name] += g * (max_norm / norm).clamp_max(1)
    return {name: value.numpy() for name, value in total.items()}


def test_the_sum_is_that_of_one_person_at_a_time():
    module, people = small_model(), torch.randn(PEOPLE, 5)
    query = query_of(module)
    drawn = np.flatnonzero(np.random.default_rng(1).random(PEOPLE) < 0.5)
    grid = grid_step(query.bound, query.numbers)
    sums = whole(query, people, Sample(drawn, b""), grid)
    for name, expected in one_at_a_time(module, people, drawn, 0.5).items():
        np.testing.assert_allclose(sums[name] * grid, expected, atol=2e-5)


def test_micro_batches_have_people_of_one_group():
    query = query_of(small_model())
    parts = query.start(EVERYBODY, 2.0**-26)
    assert [len(part) for part in parts] == [7, 7, 6] * 3
    assert np.array_equal(np.concatenate(parts), EVERYBODY.drawn)


def test_one_person_moves_the_sum_by_at_most_the_sensitivity():
    people, query = torch.randn(PEOPLE, 5), query_of(small_model())
    grid = grid_step(query.bound, query.numbers)
    everybody = EVERYBODY.drawn
    with_all = whole(query, people, EVERYBODY, grid)
    for k in range(0, PEOPLE, 9):
        rest = whole(query, people, Sample(everybody[everybody != k], b""), grid)
        moved = sum(float(((with_all[name] - rest[name]).astype(float) ** 2).sum()) for name in rest) ** 0.5
        assert moved <= query.sensitivity(grid)
        assert moved > 0.9 * 0.5 / grid  # these gradients are all clipped: the bound is met, not missed by far


def test_the_curator_answers_for_the_people_that_it_draws_and_no_others(tmp_path):
    people, query = torch.randn(PEOPLE, 5), query_of(small_model())
    with create_ledger(tmp_path, PLAN) as ledger:
        curator = Curator(people, PLAN, ledger, Keys())
        sample, grid = curator.upcoming(query)
        add_all(query, people, sample, grid)
        assert curator.ask(query).values.keys() == dict(query.module.named_parameters()).keys()
        assert not np.array_equal(curator.upcoming(query)[0].drawn, sample.drawn)
        for wrong in (sample, Sample(curator.upcoming(query)[0].drawn, b"other")):
            add_all(query, people, wrong, grid)
            with pytest.raises(PrivacyError, match="not over all of the people drawn"):
                curator.ask(query)
        sample, grid = curator.upcoming(query)
        query.start(sample, grid)
        with pytest.raises(PrivacyError, match="not over all of the people drawn"):
            curator.ask(query)
        assert ledger.account().steps_charged == 1


def test_a_sum_is_answered_once(tmp_path):
    people, query = torch.randn(PEOPLE, 5), query_of(small_model())
    with create_ledger(tmp_path, PLAN) as ledger:
        curator = Curator(people, PLAN, ledger, Keys())
        add_all(query, people, *curator.upcoming(query))
        curator.ask(query)
        with pytest.raises(PrivacyError, match="not over all of the people drawn"):
            curator.ask(query)
        with pytest.raises(PrivacyError, match="no micro-batch is left"):
            query.add(lambda: torch.zeros(1))


def test_torchs_dropout_is_refused_in_training():
    module = small_model().append(nn.Dropout(0.5))
    query = query_of(module)
    with pytest.raises(PrivacyError, match="dropout"):
        query.start(EVERYBODY, 2.0**-26)
    module.eval()
    assert whole(query, torch.randn(PEOPLE, 5), EVERYBODY, 2.0**-26)


def test_random_numbers_in_the_losses_are_refused():
    """Dropout as a function, or inside of a layer, is no module that could be looked for."""
    module = small_model()
    query, people = query_of(module), torch.randn(PEOPLE, 5)
    part = query.start(EVERYBODY, 2.0**-26)[0]
    with pytest.raises(PrivacyError, match="random numbers"):
        query.add(lambda: losses(module, (part, nn.functional.dropout(people[torch.from_numpy(part)], 0.5))))
    assert all(p.grad is None for p in module.parameters())


def test_dropout_by_person_does_not_depend_on_the_others():
    module = small_model().insert(1, Dropout(0.5)).train()
    query, people, grid = query_of(module), torch.randn(PEOPLE, 5), 2.0**-26
    two = [whole(query, people, Sample(np.array(drawn), bytes(32)), grid) for drawn in ([3, 9], [3], [9])]
    for name in two[0]:  # in the same group, so the sums round once more apart than together
        assert np.abs(two[0][name] - two[1][name] - two[2][name]).max() < 1e-5 / grid
    other = whole(query, people, Sample(np.array([3]), b"\1" * 32), grid)
    assert any((other[name] != two[1][name]).any() for name in other)

"""The clipped sum of any module: against one person at a time in float64, and through the Curator."""

import numpy as np
import pytest
import torch
from torch import nn

from dpformer import PhantomClipping
from dpformer.errors import PrivacyError
from dpformer.fit.module_sum import ModuleGradientSum
from dpformer.privacy import Curator, Keys, Sample, create_ledger, make_plan
from dpformer.privacy.query import grid_step

PEOPLE = 60
PLAN = make_plan(PEOPLE, 8.0, 1e-3, batch_size=30, steps=3)


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def losses_of(module: nn.Module):
    def losses(people: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return module(people[drawn])[:, 0].square() * 30

    return losses


def one_at_a_time(
    module: nn.Module, people: torch.Tensor, drawn: np.ndarray, max_norm: float
) -> dict[str, torch.Tensor]:
    """sum of min(1, C / |g|) g by plain autograd in float64."""
    exact = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    exact.load_state_dict(module.state_dict())
    total = {name: torch.zeros_like(p) for name, p in exact.named_parameters()}
    for k in drawn:
        loss = losses_of(exact)(people.double(), torch.tensor([int(k)])).sum()
        gradients = torch.autograd.grad(loss, list(exact.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        for (name, _), g in zip(exact.named_parameters(), gradients, strict=True):
            total[name] += g * (max_norm / norm).clamp_max(1)
    return total


def test_the_sum_is_that_of_one_person_at_a_time(module):
    people = torch.randn(PEOPLE, 5)
    query = ModuleGradientSum(PhantomClipping(module, 0.5, "flat"), losses_of(module), PLAN, micro_batch=7)
    drawn = np.flatnonzero(np.random.default_rng(1).random(PEOPLE) < 0.5)
    grid = grid_step(query.bound, query.numbers)
    sums = query.sum(people, Sample(drawn, b""), grid)
    for name, expected in one_at_a_time(module, people, drawn, 0.5).items():
        np.testing.assert_allclose(sums[name] * grid, expected.detach().numpy(), atol=2e-5)


def test_one_person_moves_the_sum_by_at_most_the_sensitivity(module):
    people = torch.randn(PEOPLE, 5)
    query = ModuleGradientSum(PhantomClipping(module, 0.5, "flat"), losses_of(module), PLAN, micro_batch=7)
    grid = grid_step(query.bound, query.numbers)
    everybody = np.arange(PEOPLE)
    whole = query.sum(people, Sample(everybody, b""), grid)
    for k in range(0, PEOPLE, 9):
        rest = query.sum(people, Sample(everybody[everybody != k], b""), grid)
        moved = sum(float(((whole[name] - rest[name]).astype(float) ** 2).sum()) for name in whole) ** 0.5
        assert moved <= query.sensitivity(grid)
        assert moved > 0.9 * 0.5 / grid  # these gradients are all clipped: the bound is met, not missed by far


def test_a_loop_through_the_curator_spends_the_plan_and_no_more(module, tmp_path):
    people = torch.randn(PEOPLE, 5)
    query = ModuleGradientSum(PhantomClipping(module, 0.5), losses_of(module), PLAN)
    with create_ledger(tmp_path, PLAN) as ledger:
        curator = Curator(people, PLAN, ledger, Keys())
        for _ in range(PLAN.steps):
            answer = curator.ask(query)
            assert set(answer.values) == dict(module.named_parameters()).keys()
        assert ledger.account().steps_charged == PLAN.steps
        with pytest.raises(PrivacyError, match="budget is spent"):
            curator.ask(query)


def test_torchs_dropout_is_refused_in_training(module, tmp_path):
    module.append(nn.Dropout(0.5))
    query = ModuleGradientSum(PhantomClipping(module, 0.5), losses_of(module), PLAN)
    with create_ledger(tmp_path, PLAN) as ledger:
        curator = Curator(torch.randn(PEOPLE, 5), PLAN, ledger, Keys())
        with pytest.raises(PrivacyError, match="dropout"):
            curator.ask(query)
        assert not ledger.account().entries
        module.eval()
        curator.ask(query)


def test_random_numbers_in_the_losses_are_refused(module, tmp_path):
    """Dropout as a function, or inside of a layer, is no module that could be looked for."""

    def losses(people: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return module(nn.functional.dropout(people[drawn], 0.5))[:, 0].square()

    query = ModuleGradientSum(PhantomClipping(module, 0.5), losses, PLAN)
    with create_ledger(tmp_path, PLAN) as ledger:
        with pytest.raises(PrivacyError, match="random numbers"):
            Curator(torch.randn(PEOPLE, 5), PLAN, ledger, Keys()).ask(query)
        assert not ledger.account().entries

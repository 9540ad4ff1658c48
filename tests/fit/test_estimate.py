"""The estimate of a step: a real micro-batch, timed and multiplied; large tables and networks are not built."""

import pytest
import torch

from dpformer.errors import DPFormerError
from dpformer.fit import estimate as module
from dpformer.fit.estimate import estimate
from dpformer.models import build
from tests.recipes import small_recipe


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock(monkeypatch):
    """Every pass takes a hundredth of a second for each user; gives the users and items of the micro-batches."""
    made = []

    def seconds(team, users, length, items):
        made.append((team.size * users, items))
        return 0.01 * users

    monkeypatch.setattr(module, "_seconds", seconds)
    return made


def test_it_times_a_whole_micro_batch_here(monkeypatch):
    settings = small_recipe().network
    monkeypatch.setattr(module, "TOKEN_BUDGET", 700)
    before = torch.get_rng_state()
    found = estimate(settings, items=50, users=200, length=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.parameters == sum(p.numel() for p in build(settings.spec(50)).parameters())
    assert (found.tokens_per_step, found.timed_items, found.whole) == (1200, 50, True)
    assert found.timed_tokens == 700 * 3 // 8 // 7 * 6  # rows of the head: three for eight tokens
    assert 0 < found.seconds < 60
    assert found.memory_bytes > module.peak_bytes() / 2


def test_seconds_grow_with_users(clock):
    one, two = (estimate(small_recipe().network, 50, users, 6) for users in (4000, 8000))
    assert two.seconds == pytest.approx(2 * one.seconds)
    assert two.memory_bytes - one.memory_bytes < 2**26


def test_a_large_table_is_timed_with_fewer_items(clock, monkeypatch):
    monkeypatch.setattr(module, "TABLE", 8 * 100)
    small, large = (estimate(small_recipe().network, items, 64, 6) for items in (100, 1000))
    assert {items for _, items in clock} == {100}
    assert large.seconds == pytest.approx(10 * small.seconds, rel=0.01)
    assert large.memory_bytes - small.memory_bytes >= 4 * 7 * 900 * 8


def test_a_slow_micro_batch_is_replaced_by_a_small_one(clock):
    found = estimate(small_recipe().network, 50, 8000, 6)
    assert not found.whole
    assert found.timed_tokens <= 256
    assert len(clock) == 1
    assert found.seconds == pytest.approx(80)


def test_a_network_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(module, "PARAMETERS", 100)
    with pytest.raises(DPFormerError, match=r"too large to time here; lower network\.d"):
        estimate(small_recipe().network, 50, 64, 6)

"""Groups of a batch: everybody in one, never more than the stated number of people, and memory that is used again."""

import numpy as np
import pytest
import torch
from scipy.stats import binom

from dpformer.data import demo_frame, prepare
from dpformer.errors import PrivacyError
from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.models import Transformer, TransformerSpec
from dpformer.privacy import PrivacyPlan, Sample
from dpformer.privacy.noise import rounded_gaussian
from dpformer.training.groups import Groups

SETTINGS = [(2, 1), (40, 20), (943, 471), (6040, 1024), (6040, 3020), (31013, 15506), (31013, 31013), (10**6, 4096)]


@pytest.mark.parametrize(("users", "batch"), SETTINGS)
def test_more_people_than_stated_are_never_drawn_from_a_group(users, batch):
    """By the exact tail of the binomial law, over all groups of a million steps."""
    groups = Groups.of(users, batch / users)
    count = -(-users // groups.block)
    assert groups.most <= 4768
    assert 10**6 * count * binom.sf(groups.most, groups.block, batch / users) < 1e-12


@pytest.mark.parametrize(("users", "batch"), SETTINGS[1:])
def test_everybody_is_in_one_group_and_two_workers_can_share_them(users, batch):
    groups = Groups.of(users, batch / users)
    drawn = np.flatnonzero(np.random.default_rng(0).random(users) < batch / users)
    parts = groups.split(drawn)
    np.testing.assert_array_equal(np.concatenate(list(parts.values())), drawn)
    assert len(parts) % 2 == 0
    for number, part in parts.items():
        assert (part // groups.block == number).all()


def test_a_sampler_that_draws_more_is_refused():
    groups = Groups.of(6040, 1024 / 6040)
    with pytest.raises(PrivacyError, match="the sampler is not the plan's"):
        groups.split(np.arange(groups.most + 1))


def test_a_sum_does_not_change_when_the_next_one_is_made():
    people = prepare(demo_frame()).sequences
    plan = PrivacyPlan(len(people), len(people) // 2, 10, float("inf"), 1e-6, 0.0)
    trainer = Trainer(
        Transformer(TransformerSpec(items=int(people.items.max()), max_length=8, d=8)), plan, Optimisation(max_length=8)
    )
    first = trainer.query.sum(people, Sample(np.arange(100), bytes(32)), 2.0**-26)
    kept = {name: value.copy() for name, value in first.items()}
    trainer.query.sum(people, Sample(np.arange(100, 300), bytes(32)), 2.0**-26)
    again = trainer.query.sum(people, Sample(np.arange(100), bytes(32)), 2.0**-26)
    for name, value in kept.items():
        np.testing.assert_array_equal(first[name], value)
        np.testing.assert_array_equal(again[name], value)
        assert value.any(), name


def test_noise_is_the_same_whatever_torch_does_with_threads(monkeypatch):
    one = rounded_gaussian(bytes(32), (70_001,), 1e9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    np.testing.assert_array_equal(rounded_gaussian(bytes(32), (70_001,), 1e9), one)

"""Sums of clipped gradients are whole numbers in float64, so they must stay below 2^53; else the query is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from dpformer.clipping import PhantomClipping
from dpformer.data import demo_frame, prepare
from dpformer.errors import PrivacyError
from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.models import build
from dpformer.privacy import Sample
from dpformer.training.groups import Groups, whole_sums
from dpformer.training.module_sum import ModuleSum
from tests.recipes import plain_recipe

# With a grid this fine, the sum of two people is above 2^53 steps.
FINE = 2.0**-52


def test_the_sum_of_a_module_that_float64_cannot_hold_is_refused():
    module = nn.Linear(2, 1)
    query, everybody = ModuleSum(module, PhantomClipping(module), Groups(4, 4), 4), Sample(np.arange(4), b"")
    assert query.start(everybody, 2.0**-26)
    with pytest.raises(PrivacyError, match=r"4 people.*too large to be exact.*batch size"):
        query.start(everybody, FINE)


def test_the_sum_of_a_network_that_float64_cannot_hold_is_refused():
    data, recipe = prepare(demo_frame()), plain_recipe(histogram=False, d=4, max_length=5, epochs=1.0)
    network = build(recipe.network.spec(len(data.catalogue)))
    trainer = Trainer(network, recipe.plan(len(data.sequences)), Optimisation.of(recipe))
    people, drawn = data.sequences, Sample(np.arange(8), bytes(32))
    assert trainer.query.sum(people, drawn, 2.0**-26)
    with pytest.raises(PrivacyError, match=r"8 people.*too large to be exact"):
        trainer.query.sum(people, drawn, FINE)


@pytest.mark.parametrize("value", [2.0**53, -(2.0**60)])
def test_a_sum_that_is_too_large_all_the_same_is_refused(value):
    with pytest.raises(PrivacyError, match="'weight' is too large to be exact"):
        whole_sums(["empty", "weight"], [torch.zeros(0), torch.tensor([0.0, value], dtype=torch.float64)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_sum_that_is_not_finite_is_refused(value):
    with pytest.raises(PrivacyError, match="'weight' is not finite"):
        whole_sums(["weight"], [torch.tensor([0.0, value, 1.0], dtype=torch.float64)])

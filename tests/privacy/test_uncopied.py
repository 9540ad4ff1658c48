"""Curator, ledger and keys have one life: a copy would answer another query for the same charge."""

import copy
import pickle

import pytest

from dpformer.errors import PrivacyError
from dpformer.privacy import Curator, Keys, create_ledger, make_plan
from dpformer.statistics.histogram import HISTOGRAM, Histogram
from tests.people import people

PLAN = make_plan(20, 6.0, 1e-2, shares={HISTOGRAM: 1.0})


class Own(Curator):
    """A subclass does not change it."""


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps, lambda made: copy.deepcopy({"held": [made]})])
@pytest.mark.parametrize("which", ["Curator", "Own", "Ledger", "Keys"])
def test_it_cannot_be_copied_or_pickled(which, way, tmp_path):
    with create_ledger(tmp_path, PLAN) as ledger:
        keys, log = Keys(), people([[1, 2]] * 20)
        curators = {"Curator": Curator(log, PLAN, ledger, keys), "Own": Own(log, PLAN, ledger, keys)}
        made = {**curators, "Ledger": ledger, "Keys": keys}[which]
        with pytest.raises(PrivacyError, match=f"a {which} cannot be copied or pickled.*resume"):
            way(made)
        # The object itself goes on as before, and a state of keys can be kept.
        assert Keys.restored(keys.state()).place == 0
        curators["Curator"].ask(Histogram(2))
        assert len(ledger.account().entries) == 1

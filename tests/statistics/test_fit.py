"""Statistics asked of a Curator: what is charged, how much noise there is, replays, and that each stage holds its bound."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, norm

from dpformer.errors import DataError, DPFormerError, PrivacyError
from dpformer.fit.presets import make_recipe
from dpformer.fit.scorers import fit_transitions
from dpformer.models import TransitionScorer
from dpformer.privacy import Curator, Keys, create_ledger, make_plan, read_ledger
from dpformer.privacy.accounting import composed_multiplier
from dpformer.privacy.ledger import open_ledger
from dpformer.privacy.noise import rounded_gaussian
from dpformer.privacy.query import Sample
from dpformer.statistics.histogram import Histogram
from dpformer.statistics.settings import TransitionSettings
from tests.asking import Asking
from tests.people import people, without
from tests.statistics.fits import POPULARITY_SHARES, all_shares, fit_all, fit_popularity, measure_all
from tests.statistics.test_queries import largest_move, same_for_others

ITEMS = 30
SETTINGS = TransitionSettings(head=12)
PLAN = make_plan(200, 4.0, 1e-4, shares=all_shares(SETTINGS))


def walks(count: int = 200, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    starts = random.integers(1, ITEMS + 1, count)
    return [[(int(start) + k) % ITEMS + 1 for k in range(random.integers(2, 12))] for start in starts]


def curate(folder, log=None, plan=PLAN, keys=None, **options) -> Curator:
    return Curator(
        people(walks() if log is None else log), plan, create_ledger(folder, plan), keys or Keys(seed=0), **options
    )


def state_of(model: TransitionScorer) -> dict[str, list]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


# --- what is charged ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fit", "shares"),
    [
        (fit_popularity, POPULARITY_SHARES),
        (partial(fit_all, settings=SETTINGS), all_shares(SETTINGS)),
        (partial(fit_all, settings=TransitionSettings.one_stage()), all_shares(TransitionSettings.one_stage())),
    ],
    ids=["popularity", "transitions", "one stage"],
)
def test_a_fit_charges_its_shares_in_order_and_is_one_gaussian_mechanism(tmp_path, fit, shares):
    plan = make_plan(200, 4.0, 1e-4, shares=shares)
    stds = []

    def watched(key, shape, std):
        stds.append(std * 2.0**-26)
        return rounded_gaussian(key, shape, std)

    fit(curate(tmp_path, plan=plan, noise=watched), ITEMS)
    account = read_ledger(tmp_path)
    assert [entry.name for entry in account.entries] == list(shares)
    assert account.spent() == plan.releases
    # Each user's vector has norm 1, so the noise is the multiplier; together they are the multiplier of the whole budget.
    np.testing.assert_allclose(stds, [release.noise_multiplier for release in plan.releases], rtol=1e-12)
    whole = make_plan(200, 4.0, 1e-4, shares={"all": 1.0}).releases[0].noise_multiplier
    assert composed_multiplier(stds) == pytest.approx(whole, rel=1e-9)


def test_what_was_not_planned_is_refused(tmp_path):
    curator = curate(tmp_path / "1", plan=make_plan(200, 4.0, 1e-4, shares=all_shares(TransitionSettings.one_stage())))
    with pytest.raises(PrivacyError, match="budget is spent"):
        fit_all(curator, ITEMS, SETTINGS)
    curator = curate(tmp_path / "2")
    exact = Asking(people(walks()), 1.0, POPULARITY_SHARES).ask(Histogram(ITEMS))
    with pytest.raises(PrivacyError, match="not the next"):
        fit_transitions(curator, exact, 1.0, 200, SETTINGS)
    assert not curator.ledger.account().entries


def test_a_log_that_cannot_be_is_refused_and_nothing_is_charged(tmp_path):
    curator = curate(tmp_path, [[1, ITEMS + 1], [2]])
    with pytest.raises(DataError, match="outside"):
        fit_all(curator, ITEMS, SETTINGS)
    assert not curator.ledger.account().entries


# --- replays --------------------------------------------------------------------------------------------------------------


class CrashError(Exception):
    pass


@pytest.mark.parametrize("charged", [1, 2, 3])
def test_a_fit_that_crashed_is_made_again_with_the_same_answers_and_charged_once(tmp_path, charged):
    """The queries of the later stages depend on the answers of the earlier ones: all of them come out the same."""
    state = Keys().state()
    whole = fit_all(curate(tmp_path / "whole", keys=Keys.restored(state)), ITEMS, SETTINGS)
    calls = 0

    def crashing(key, shape, std):
        nonlocal calls
        calls += 1
        if calls > charged:
            raise CrashError
        return rounded_gaussian(key, shape, std)

    first = curate(tmp_path / "run", keys=Keys.restored(state), noise=crashing)
    with pytest.raises(CrashError):
        fit_all(first, ITEMS, SETTINGS)
    assert len(first.ledger.account().entries) == charged + 1
    first.ledger.close()
    again = Curator(people(walks()), PLAN, open_ledger(tmp_path / "run"), Keys.restored(state))
    model = fit_all(again, ITEMS, SETTINGS)
    assert state_of(model) == state_of(whole)
    assert len(again.ledger.account().entries) == 4
    entries = [[entry.tag for entry in read_ledger(tmp_path / name).entries] for name in ("run", "whole")]
    assert entries[0] == entries[1]


@pytest.mark.parametrize(
    ("settings", "log"),
    [
        (TransitionSettings(head=12, lags=3), walks()),
        (TransitionSettings(head=11), walks()),
        (SETTINGS, without(walks(), 5)),
    ],
    ids=["other lags", "another head", "without one person"],
)
def test_a_replay_with_other_questions_or_people_is_refused(tmp_path, settings, log):
    state = Keys().state()
    first = curate(tmp_path, keys=Keys.restored(state))
    fit_all(first, ITEMS, SETTINGS)
    first.ledger.close()
    again = Curator(people(log), PLAN, open_ledger(tmp_path), Keys.restored(state))
    with pytest.raises(PrivacyError, match="another sum"):
        fit_all(again, ITEMS, settings)


# --- noise and bounds -----------------------------------------------------------------------------------------------------


class Kept:
    """Asks a Curator, and keeps queries and answers."""

    def __init__(self, curator: Curator) -> None:
        self.curator, self.kept = curator, []

    def ask(self, query):
        self.kept.append((query, self.curator.ask(query)))
        return self.kept[-1][1]


def noise_p_values(folder, **options) -> list[float]:
    """KS tests of each answer of a fit, less its exact sum, against the noise of its share; computed from the plan alone."""
    asker, log = Kept(curate(folder, **options)), people(walks())
    measure_all(asker, ITEMS, SETTINGS)
    values = []
    for (query, answer), release in zip(asker.kept, PLAN.releases, strict=True):
        exact = query.sum(log, Sample(np.arange(200), bytes(32)), answer.grid)[query.name] * answer.grid
        left = (answer.values[query.name] - exact).ravel()
        values.append(kstest(left, norm(0, release.noise_multiplier).cdf).pvalue)
    return values


def test_the_noise_of_every_answer_is_that_of_its_share(tmp_path):
    """Seeded keys: passes always or never. 31 and 144 numbers an answer are enough to see a factor of 0.7 in all of them."""
    assert min(noise_p_values(tmp_path / "1")) > 1e-4
    weaker = noise_p_values(tmp_path / "2", noise=lambda key, shape, std: rounded_gaussian(key, shape, 0.5 * std))
    assert np.prod(weaker) < 1e-12
    none = noise_p_values(tmp_path / "3", noise=lambda key, shape, std: np.zeros(shape, dtype=np.int64))
    assert max(none) < 1e-6


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=5),
    st.integers(0, 2**32 - 1),
    st.floats(0.05, 2),
)
def test_given_the_same_earlier_answers_every_stage_of_a_fit_holds_its_bound(log, seed, sigma):
    """The cells that a real fit selects, from noise and all, asked of all neighbours."""
    chosen = TransitionSettings(head=4)
    asker = Asking(people(log), sigma, all_shares(chosen), seed)
    measure_all(asker, 6, chosen)
    assert len(asker.queries) == 4
    for query in asker.queries:
        assert largest_move(query, log) <= query.sensitivity(2.0**-26) ** 2
        assert same_for_others(query, log)


# --- settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"head": 0}, "head = 0"),
        ({"folds": 1}, "folds = 1"),
        ({"cell_power": 7.0}, "cell_power = 7"),
        ({"stage_shares": (1.0, -0.03), "thresholds": (0.4,)}, "above 0"),
        ({"thresholds": (0.4,)}, "need 2 thresholds"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, complaint):
    with pytest.raises(PrivacyError, match=complaint):
        TransitionSettings(**changes)


def test_shares_that_do_not_sum_to_1_are_refused():
    with pytest.raises(DPFormerError, match="sum to 1"):
        make_recipe("transitions", **{"histogram.share": 0.1})


def test_the_seed_alone_decides_and_is_marked(tmp_path):
    first, second, third = (
        fit_all(curate(tmp_path / str(n), keys=Keys(seed=seed)), ITEMS, SETTINGS) for n, seed in enumerate((3, 3, 4))
    )
    assert state_of(first) == state_of(second) != state_of(third)
    assert all(torch.isfinite(first.state_dict()[name]).all() for name in ("matrix", "prior"))
    assert math.isinf(first.state_dict()["tail"][0])

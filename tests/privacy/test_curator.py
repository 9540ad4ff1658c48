"""The Curator: charged and synced before noise exists, nothing that is not planned, and noise that is what was promised."""

import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2, kstest, norm

from dpformer.errors import PrivacyError
from dpformer.privacy.chain import CHAIN
from dpformer.privacy.curator import Curator
from dpformer.privacy.keys import Keys
from dpformer.privacy.ledger import create_ledger, open_ledger, read_ledger
from dpformer.privacy.noise import poisson_draw, rounded_gaussian
from dpformer.privacy.plan import GRADIENTS, make_plan
from dpformer.privacy.query import grid_step
from tests.asking import watch_syncs
from tests.privacy.test_samples import fixed_size

PLAN = make_plan(50, 3.0, 1e-3, steps=2, shares={"first": 0.3, "second": 0.3})
POISSON = make_plan(300, 5.0, 1e-3, 60, steps=60)
FREE = make_plan(50, math.inf, 1e-3, steps=1, shares={"first": 0.5})
TINY = 1e-6
"""The level of the tests with seeded keys, which pass always or never. With fresh keys the bound is 5.5 sigma, 4e-8."""


class Table:
    """A query over people given as an array [people, numbers] of norm at most 1 in each row: their sum, cut to the grid."""

    def __init__(self, name: str = "first", bound: float = 1.0, numbers: int = 40, arrays: int = 1) -> None:
        self.name, self.bound, self.numbers = name, bound, numbers * arrays
        self.arrays = [f"{name} {n}" for n in range(arrays)]
        self.seen: list[np.ndarray] = []

    def sensitivity(self, grid: float) -> float:
        return self.bound / grid

    def sum(self, people, sample, grid):
        self.seen.append(sample.drawn)
        total = np.trunc(people[sample.drawn] / grid).astype(np.int64).sum(axis=0)
        return dict.fromkeys(self.arrays, total)


class Broken(Table):
    """A sum that is not what the query said: `change` is applied to it."""

    def __init__(self, change, **options) -> None:
        super().__init__(**options)
        self.change = change

    def sum(self, people, sample, grid):
        return {name: self.change(value) for name, value in super().sum(people, sample, grid).items()}


def table(numbers: int = 40, people: int = 50, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((people, numbers))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) * 0.999


def curate(folder: Path, plan=PLAN, people=None, keys=None, **options) -> Curator:
    """A Curator with a new ledger in the folder."""
    people = table(people=plan.users) if people is None else people
    return Curator(people, plan, create_ledger(folder, plan), keys or Keys(seed=1), **options)


def charged(curator: Curator) -> list[str]:
    return [entry.name for entry in curator.ledger.account().entries]


# --- order --------------------------------------------------------------------------------------------------------------


def test_the_line_is_synced_before_noise_is_drawn_and_after_the_sum(tmp_path, monkeypatch):
    events = []
    synced = watch_syncs(monkeypatch, tmp_path / CHAIN)

    class Watched(Table):
        def sum(self, people, sample, grid):
            events.append(("sum", self.name, synced().count(b'"tag"'), len(read_ledger(tmp_path).entries)))
            return super().sum(people, sample, grid)

    def looking(key, shape, std):
        events.append(("noise", "", synced().count(b'"tag"'), len(read_ledger(tmp_path).entries)))
        return rounded_gaussian(key, shape, std)

    curator = curate(tmp_path, noise=looking)
    for name in ("first", "second", GRADIENTS):
        curator.ask(Watched(name))
    assert [event[0] for event in events] == ["sum", "noise"] * 3
    assert [event[2:] for event in events] == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]


def test_a_crash_while_noise_is_drawn_stays_charged_and_the_answer_can_be_asked_again(tmp_path):
    calls = []

    def failing(key, shape, std):
        calls.append(key)
        if len(calls) == 1:
            raise OSError("no memory")
        return rounded_gaussian(key, shape, std)

    curator = curate(tmp_path, noise=failing)
    with pytest.raises(OSError, match="no memory"):
        curator.ask(Table())
    assert charged(curator) == ["first"]
    curator.ask(Table())
    assert charged(curator) == ["first"]
    assert calls[0] == calls[1]


def test_a_ledger_that_cannot_be_written_releases_nothing(tmp_path, monkeypatch):
    drawn = []
    curator = curate(tmp_path, noise=lambda *arguments: drawn.append(arguments))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PrivacyError, match="No space left"):
        curator.ask(Table())
    assert not drawn
    assert curator.keys.place == 0


# --- refusals -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "the second of the plan": (Table("second"), "not the next"),
    "a step": (Table(GRADIENTS), "not the next"),
    "another name": (Table("third"), "not the next"),
    "too few numbers": (Broken(lambda value: value[1:]), "another size"),
    "too many numbers": (Broken(lambda value: np.concatenate([value, value])), "another size"),
    "float sums": (Broken(lambda value: value.astype(float)), "not of whole numbers"),
    "32-bit sums": (Broken(lambda value: value.astype(np.int32)), "not of whole numbers"),
    "not finite": (Broken(lambda value: value * math.nan), "not of whole numbers"),
}


@pytest.mark.parametrize(("query", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_planned_is_refused_and_nothing_is_charged(tmp_path, query, word):
    drawn = []
    curator = curate(tmp_path, noise=lambda *arguments: drawn.append(arguments))
    with pytest.raises(PrivacyError, match=word):
        curator.ask(query)
    assert charged(curator) == []
    assert curator.keys.place == 0
    assert not drawn


def test_beyond_the_plan_nothing_is_answered(tmp_path):
    curator = curate(tmp_path)
    for name in ("first", "second", GRADIENTS, GRADIENTS):
        curator.ask(Table(name))
    for name in (GRADIENTS, "first", "second"):
        with pytest.raises(PrivacyError, match="budget is spent"):
            curator.ask(Table(name))
    assert charged(curator) == ["first", "second", GRADIENTS, GRADIENTS]


@pytest.mark.parametrize("size", [2**53, 2**62, 2**63 - 1])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_answer_that_is_not_exact_in_float64_is_refused(tmp_path, size, sign):
    curator = curate(tmp_path)
    with pytest.raises(PrivacyError, match="not exact"):
        curator.ask(Broken(lambda value: np.full_like(value, sign * size)))
    assert charged(curator) == []
    assert curator.keys.place == 0


@pytest.mark.parametrize("bound", [2.0**-27, 2.0**50])
def test_noise_outside_of_its_range_is_refused_before_anything_is_summed_or_charged(tmp_path, bound):
    """A query that claims another sensitivity than its grid has: noise below one step, or above 2^40."""

    class Claims(Table):
        def sensitivity(self, grid: float) -> float:
            return bound / grid

    curator, query = curate(tmp_path), Claims()
    with pytest.raises(PrivacyError, match="grid steps"):
        curator.ask(query)
    assert not query.seen
    assert charged(curator) == []
    assert curator.keys.place == 0


def test_plan_and_ledger_belong_together(tmp_path):
    ledger = create_ledger(tmp_path, PLAN)
    with pytest.raises(PrivacyError, match="another plan"):
        Curator(table(), make_plan(50, 3.0, 1e-3, steps=3), ledger, Keys())
    with pytest.raises(PrivacyError, match="needs a ledger"):
        Curator(table(), PLAN, None, Keys())
    with pytest.raises(PrivacyError, match="has none"):
        Curator(table(), FREE, ledger, Keys())


def test_people_who_get_other_events_keep_their_number(tmp_path):
    """More cannot be checked; the rest is the caller's promise."""
    curator = curate(tmp_path, noise=none)
    with pytest.raises(PrivacyError, match="keep their place"):
        curator.replace_events(lambda people: people[1:])
    curator.replace_events(lambda people: people / 2)
    answer = curator.ask(Table())
    np.testing.assert_array_equal(answer.values["first 0"], exact_sum(table() / 2, answer.grid))


# --- replays ------------------------------------------------------------------------------------------------------------


def again(curator: Curator, state: dict, folder: Path, people=None) -> Curator:
    """The same run, restored from a state of its keys, as after a crash."""
    curator.ledger.close()
    people = table() if people is None else people
    return Curator(people, curator.plan, open_ledger(folder), Keys.restored(state))


def test_a_replay_is_the_same_answer_and_charged_once(tmp_path):
    curator = curate(tmp_path, keys=Keys())
    curator.ask(Table("first"))
    state = curator.keys.state()
    before = [curator.ask(Table(name)) for name in ("second", GRADIENTS)]
    restored = again(curator, state, tmp_path)
    after = [restored.ask(Table(name)) for name in ("second", GRADIENTS)]
    for one, other in zip(before, after, strict=True):
        assert (one.name, one.noise_std, one.grid) == (other.name, other.noise_std, other.grid)
        np.testing.assert_array_equal(one.values[f"{one.name} 0"], other.values[f"{one.name} 0"])
    assert charged(restored) == ["first", "second", GRADIENTS]
    restored.ask(Table(GRADIENTS))
    assert charged(restored) == ["first", "second", GRADIENTS, GRADIENTS]


def one_step_more(value: np.ndarray) -> np.ndarray:
    changed = value.copy()
    changed[0] += 1
    return changed


@pytest.mark.parametrize(
    "other",
    [
        lambda: (Broken(one_step_more), table()),
        lambda: (Broken(lambda value: value * 3 // 2), table()),
        lambda: (Table(), table(seed=1)),
        # The same sum with another sensitivity: the same draw at two scales would tell the sum.
        lambda: (Table(bound=1.5), table()),
    ],
    ids=["one step", "1.5 times as large", "other people", "another sensitivity"],
)
def test_a_replay_with_another_query_is_refused(tmp_path, other):
    query, people = other()
    assert grid_step(1.0, 40) == grid_step(1.5, 40)
    curator = curate(tmp_path, keys=Keys())
    state = curator.keys.state()
    curator.ask(Table())
    restored = again(curator, state, tmp_path, people)
    with pytest.raises(PrivacyError, match="another sum"):
        restored.ask(query)
    assert charged(restored) == ["first"]


def test_fresh_keys_cannot_ask_again_what_was_charged(tmp_path):
    curator = curate(tmp_path, keys=Keys())
    curator.ask(Table())
    with pytest.raises(PrivacyError, match="another sum"):
        again(curator, Keys().state(), tmp_path).ask(Table())


# --- the answer ---------------------------------------------------------------------------------------------------------


def exact_sum(people: np.ndarray, grid: float) -> np.ndarray:
    return np.trunc(people / grid).sum(axis=0) * grid


def test_answers_are_whole_multiples_of_the_grid_with_at_least_the_planned_noise(tmp_path):
    curator = curate(tmp_path)
    names = ["first", "second", GRADIENTS, GRADIENTS]
    for place, (name, bound) in enumerate(zip(names, (1.0, 0.37, 1.9, 3.3), strict=True)):
        query = Table(name, bound)
        answer = curator.ask(query)
        values = answer.values[query.arrays[0]]
        grid = grid_step(bound, 40)
        assert answer.name == name
        assert answer.grid == grid
        steps = values / grid
        assert (steps == np.round(steps)).all()
        np.testing.assert_array_equal(steps * grid, values)
        multiplier = PLAN.planned(place).noise_multiplier
        # Rounded up: never below, and by less than a part in 10^15 above.
        promised = Fraction(multiplier) * Fraction(query.sensitivity(grid)) * Fraction(grid)
        assert promised <= Fraction(answer.noise_std) < promised * (1 + Fraction(1, 10**15))


def test_the_answer_is_the_sum_and_the_noise_of_its_key(tmp_path):
    """Nothing else: rebuilt from the key by hand."""
    asked = []

    def watched(key, shape, std):
        asked.append((key, shape, std))
        return rounded_gaussian(key, shape, std)

    query = Table(arrays=3)
    answer = curate(tmp_path, noise=watched).ask(query)
    assert len({key for key, _, _ in asked}) == 3, "a key for each array"
    for name, (key, shape, std) in zip(query.arrays, asked, strict=True):
        assert answer.noise_std == std * answer.grid
        noise = rounded_gaussian(key, shape, std) * answer.grid
        np.testing.assert_array_equal(answer.values[name] - noise, exact_sum(table(), answer.grid))


def test_without_privacy_answers_are_exact_and_there_is_no_ledger():
    curator = Curator(table(), FREE, None, Keys())
    for name in ("first", GRADIENTS):
        answer = curator.ask(Table(name))
        assert answer.noise_std == 0
        np.testing.assert_array_equal(answer.values[f"{name} 0"], exact_sum(table(), answer.grid))
        # Each person's value is cut to the grid.
        np.testing.assert_allclose(answer.values[f"{name} 0"], table().sum(axis=0), atol=len(table()) * answer.grid)
    with pytest.raises(PrivacyError, match="budget is spent"):
        curator.ask(Table(GRADIENTS))


# --- statistics of the answers --------------------------------------------------------------------------------------------


def noise_of(curator: Curator, people: np.ndarray) -> np.ndarray:
    """The noise in all answers of the plan, divided by what the plan promises, computed from the plan alone."""
    residuals = []
    for place, name in enumerate(("first", "second", GRADIENTS, GRADIENTS)):
        answer = curator.ask(Table(name, numbers=people.shape[1]))
        left = answer.values[f"{name} 0"] - exact_sum(people, answer.grid)
        residuals.append(left / curator.plan.planned(place).noise_multiplier)
    return np.concatenate(residuals)


def weaker(key, shape, std):
    return rounded_gaussian(key, shape, 0.7 * std)


def none(key, shape, std):
    return np.zeros(shape, dtype=np.int64)


def uniform(key, shape, std):
    """The right standard deviation and another law."""
    seed = int.from_bytes(key, "little")
    return np.rint(np.random.default_rng(seed).uniform(-math.sqrt(3) * std, math.sqrt(3) * std, shape)).astype(np.int64)


def same_for_all(key, shape, std):
    """Noise that does not depend on the key: the same in every answer."""
    return rounded_gaussian(bytes(32), shape, std)


def test_a_plain_test_of_the_answers_accepts_the_noise_and_sees_planted_defects(tmp_path):
    people = table(2000)
    honest = noise_of(curate(tmp_path / "honest", people=people), people)
    assert kstest(honest, norm.cdf).pvalue > TINY
    for planted in (weaker, none, uniform):
        residual = noise_of(curate(tmp_path / planted.__name__, people=people, noise=planted), people)
        assert kstest(residual, norm.cdf).pvalue < 1e-12, planted.__name__


def test_answers_of_one_run_do_not_share_noise(tmp_path):
    people = table(5000)

    def largest(**options) -> float:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        correlation = np.corrcoef(noise_of(curate(folder, people=people, **options), people).reshape(4, -1))
        return np.abs(correlation[~np.eye(4, dtype=bool)]).max()

    assert largest() < 5.5 / math.sqrt(5000)
    assert largest(noise=same_for_all) > 0.99


class Forgetful(Keys):
    """The planted keys: the sum is not in the key of its noise."""

    def noise(self, array: str, digest: bytes) -> bytes:
        return super().noise(array, b"")


@pytest.mark.parametrize(("kind", "shared"), [(Keys, False), (Forgetful, True)])
def test_two_curators_from_one_state_with_different_data_never_share_noise(tmp_path, kind, shared):
    """A copied folder, or a fork: their difference would tell the difference of the sums."""
    one, other = table(5000), table(5000)
    other[3] = 0.0
    state = kind().state()
    noises = [
        noise_of(curate(tmp_path / str(n), people=people, keys=kind.restored(state)), people)
        for n, people in enumerate((one, other))
    ]
    correlation = np.corrcoef(*noises)[0, 1]
    assert correlation > 0.99 if shared else abs(correlation) < 5.5 / math.sqrt(len(noises[0]))


def test_one_sum_with_two_sensitivities_never_shares_noise(tmp_path):
    people, state = table(5000), Keys().state()
    noises = []
    for bound in (1.0, 1.5):
        curator = curate(tmp_path / str(bound), people=people, keys=Keys.restored(state))
        answer = curator.ask(Table(bound=bound, numbers=5000))
        noises.append(answer.values["first 0"] - exact_sum(people, answer.grid))
    assert abs(np.corrcoef(*noises)[0, 1]) < 5.5 / math.sqrt(5000)


def batch_sizes(folder: Path, **options) -> np.ndarray:
    curator = curate(folder, POISSON, **options)
    queries = [Table(GRADIENTS) for _ in range(POISSON.steps)]
    for query in queries:
        curator.ask(query)
    return np.array([len(query.seen[0]) for query in queries])


def size_p_value(sizes: np.ndarray) -> float:
    """The chance of a variance as far from N q (1 - q): (n - 1) s^2 over it is nearly chi-square."""
    expected = POISSON.users * POISSON.rate * (1 - POISSON.rate)
    statistic = (len(sizes) - 1) * sizes.var(ddof=1) / expected
    return 2 * min(chi2.cdf(statistic, len(sizes) - 1), chi2.sf(statistic, len(sizes) - 1))


def test_steps_ask_poisson_samples_and_another_sampler_is_seen(tmp_path):
    sizes = batch_sizes(tmp_path / "honest")
    assert abs(sizes.mean() - 60) < 5.5 * math.sqrt(48 / len(sizes))
    assert size_p_value(sizes) > TINY
    assert size_p_value(batch_sizes(tmp_path / "fixed", draw=fixed_size)) < 1e-12
    twice = batch_sizes(tmp_path / "twice", draw=lambda key, users, rate: poisson_draw(key, users, 2 * rate))
    assert abs(twice.mean() - 60) > 20


def test_samples_of_a_run_are_repeated_by_its_keys_alone(tmp_path):
    """Who is drawn depends on the key and the place, not on the data."""
    one, other = Table(GRADIENTS), Table(GRADIENTS)
    state = Keys().state()
    curate(tmp_path / "1", POISSON, keys=Keys.restored(state)).ask(one)
    curate(tmp_path / "2", POISSON, people=table(people=300, seed=4), keys=Keys.restored(state)).ask(other)
    np.testing.assert_array_equal(one.seen[0], other.seen[0])

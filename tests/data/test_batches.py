"""Poisson batches: who is drawn, how often, and that cutting them loses nobody."""

import json
from collections.abc import Callable, Iterator

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpformer.data import PoissonSampler, Sequences, collate, cut, demo_frame, micro_batches, prepare
from dpformer.errors import DataError


def some_sequences(lengths: list[int]) -> Sequences:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = np.random.default_rng(0).integers(1, 1000, offsets[-1]).astype(np.int32)
    return Sequences(pl.Series(range(len(lengths))), items, offsets)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=50)


USERS, STEPS = 200, 4000


def check_poisson(draw: Callable[[], np.ndarray], rate: float) -> None:
    """Every bound holds for true Poisson sampling but for one time in about a million."""
    drawn = np.zeros((STEPS, USERS), dtype=bool)
    for step in range(STEPS):
        drawn[step, draw()] = True
    # Each user over the steps, all users together.
    low, high = stats.binom.interval(1 - 1e-6 / USERS, STEPS, rate)
    counts = drawn.sum(axis=0)
    assert low <= counts.min()
    assert counts.max() <= high
    low, high = stats.binom.interval(1 - 1e-6, STEPS * USERS, rate)
    assert low <= counts.sum() <= high
    # The size of a batch varies as a binomial: five standard errors of a variance, about sqrt(2 / STEPS) each.
    assert drawn.sum(axis=1).var() == pytest.approx(USERS * rate * (1 - rate), rel=5 * (2 / STEPS) ** 0.5)
    # A user is in two batches running as often as independence has it: even and odd steps paired, all users.
    low, high = stats.binom.interval(1 - 1e-6, STEPS // 2 * USERS, rate**2)
    assert low <= (drawn[::2] & drawn[1::2]).sum() <= high


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_inclusion_rates_are_within_binomial_bounds(rate: float):
    check_poisson(PoissonSampler(USERS, rate, seed=7).draw, rate)


def epochs(rng: np.random.Generator, size: int) -> Iterator[np.ndarray]:
    """What an ordinary data loader does: shuffle, then deal out everybody once an epoch."""
    while True:
        yield from np.split(rng.permutation(USERS), USERS // size)


@pytest.mark.parametrize("defect", ["fixed size", "shuffled epochs", "one user favoured", "every batch twice", "rate"])
def test_a_planted_defect_is_found(defect: str):
    rng, rate = np.random.default_rng(1), 0.1
    sampler, shuffled = PoissonSampler(USERS, rate, seed=1), epochs(rng, round(rate * USERS))
    twice = (batch for _ in range(STEPS) for batch in [sampler.draw()] * 2)
    wrong: dict[str, Callable[[], np.ndarray]] = {
        "fixed size": lambda: rng.choice(USERS, round(rate * USERS), replace=False),
        "shuffled epochs": lambda: next(shuffled),
        "one user favoured": lambda: np.union1d(sampler.draw(), [3] if rng.random() < 0.05 else []).astype(np.int64),
        "every batch twice": lambda: next(twice),
        "rate": PoissonSampler(USERS, 1.05 * rate, seed=1).draw,
    }
    with pytest.raises(AssertionError):
        check_poisson(wrong[defect], rate)


def test_every_user_is_drawn_at_rate_one():
    assert PoissonSampler(5, 1.0).draw().tolist() == [0, 1, 2, 3, 4]


def test_a_seed_reproduces_and_the_system_does_not():
    def draws(seed: int | None) -> list[list[int]]:
        sampler = PoissonSampler(1000, 0.5, seed)
        return [sampler.draw().tolist() for _ in range(3)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert draws(None) != draws(None)
    assert PoissonSampler(1, 0.5, 3).seeded
    assert not PoissonSampler(1, 0.5).seeded


@pytest.mark.parametrize("seed", [None, 5])
def test_state_goes_on_where_it_was_taken(seed: int | None):
    sampler = PoissonSampler(100, 0.3, seed)
    sampler.draw()
    state = json.loads(json.dumps(sampler.state()))
    other = PoissonSampler.restored(state)
    assert other.seeded == sampler.seeded
    for _ in range(3):
        assert other.draw().tolist() == sampler.draw().tolist()


def test_empty_batches_are_drawn():
    sequences = some_sequences([3, 4])
    sampler = PoissonSampler(2, 0.2, seed=1)
    batches = [list(micro_batches(sequences, sampler.draw(), max_length=10, token_budget=100)) for _ in range(200)]
    empty = sum(not batch for batch in batches)
    low, high = stats.binom.interval(1 - 1e-6, 200, 0.8**2)
    assert low <= empty <= high


@given(lengths=LENGTHS, budget=st.integers(1, 200), data=st.data())
def test_every_sampled_user_is_in_exactly_one_micro_batch(lengths: list[int], budget: int, data: st.DataObject):
    sequences = some_sequences(lengths)
    users = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))), dtype=np.int64)
    parts = cut(users, sequences.lengths[users], budget)
    assert sorted(np.concatenate([*parts, np.empty(0, dtype=np.int64)]).tolist()) == users.tolist()
    for part in parts:
        longest = sequences.lengths[part].max()
        assert len(part) == 1 or len(part) * longest <= budget
        assert (longest - sequences.lengths[part]).sum() <= budget / 4
    widest = [sequences.lengths[part].max() for part in parts]
    assert widest == sorted(widest, reverse=True)


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 200), rows=st.integers(1, 100), longest=st.integers(1, 12))
def test_a_second_budget_counts_no_more_than_so_much_of_each_user(
    lengths: list[int], budget: int, rows: int, longest: int
):
    sequences = some_sequences(lengths)
    parts = cut(np.arange(len(lengths)), sequences.lengths, budget, rows, longest)
    assert sorted(user for part in parts for user in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or np.minimum(sequences.lengths[part], longest).sum() <= rows
    # Where it is never reached, it changes nothing.
    alone = cut(np.arange(len(lengths)), sequences.lengths, budget)
    ample = cut(np.arange(len(lengths)), sequences.lengths, budget, budget * longest, longest)
    assert [part.tolist() for part in ample] == [part.tolist() for part in alone]


@settings(deadline=None)
@given(lengths=LENGTHS, max_length=st.integers(1, 30), budget=st.integers(1, 200))
def test_tensors_hold_the_last_items_and_nothing_else(lengths: list[int], max_length: int, budget: int):
    sequences = some_sequences(lengths)
    everybody = np.arange(len(lengths))
    seen = 0
    for part in micro_batches(sequences, everybody, max_length=max_length, token_budget=budget):
        assert part.tokens.dtype == part.lengths.dtype == torch.int64
        assert part.tokens.shape == (len(part.users), int(part.lengths.max()))
        for user, tokens, length in zip(part.users, part.tokens, part.lengths, strict=True):
            assert tokens[:length].tolist() == sequences[user][-max_length:].tolist()
            assert not tokens[length:].any()
            seen += 1
    assert seen == len(lengths)


def test_the_example_in_the_docstring():
    sequences = Sequences(pl.Series(["a", "b"]), np.array([3, 1, 4, 5], dtype=np.int32), np.array([0, 3, 4]))
    batch = collate(sequences, np.array([0, 1]), max_length=10)
    assert batch.tokens.tolist() == [[3, 1, 4], [5, 0, 0]]
    assert batch.lengths.tolist() == [3, 1]


def test_sorting_by_length_saves_most_of_the_padding():
    sequences = prepare(demo_frame()).sequences
    batch = list(micro_batches(sequences, np.arange(len(sequences)), max_length=50, token_budget=4096))
    positions = sum(part.tokens.numel() for part in batch)
    events = sum(int(part.lengths.sum()) for part in batch)
    assert 1 - events / positions < 0.1
    assert 1 - events / (50 * len(sequences)) > 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PoissonSampler(0, 0.5),
        lambda: PoissonSampler(5, 0.0),
        lambda: PoissonSampler(5, 1.5),
        lambda: PoissonSampler(5, float("nan")),
        lambda: cut(np.array([0]), np.array([1]), 0),
        lambda: list(micro_batches(some_sequences([1]), np.array([0]), max_length=0, token_budget=1)),
    ],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(DataError):
        wrong()


@given(
    st.lists(st.lists(st.integers(1, 6), max_size=8), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
@settings(max_examples=50)
def test_renumbered_items_stay_with_their_user(users: list[list[int]], numbers: list[int]):
    table = np.array([0, *numbers])
    flat = np.array([item for user in users for item in user], dtype=np.int32)
    sequences = Sequences(pl.Series(range(len(users))), flat, np.cumsum([0, *map(len, users)]))
    found = sequences.renumbered(table)
    assert [user.tolist() for user in found] == [[table[i] for i in user if table[i]] for user in users]

"""Micro-batches: cutting a batch loses nobody."""

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Sequences, collate, demo_frame, micro_batches, prepare
from dpformer.data.batches import class_widths, cut
from dpformer.errors import DataError


def some_sequences(lengths: list[int]) -> Sequences:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = np.random.default_rng(0).integers(1, 1000, offsets[-1]).astype(np.int32)
    return Sequences(pl.Series(range(len(lengths))), items, offsets)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=50)


@given(lengths=LENGTHS, budget=st.integers(1, 200), data=st.data())
def test_every_sampled_user_is_in_exactly_one_micro_batch(lengths: list[int], budget: int, data: st.DataObject):
    sequences = some_sequences(lengths)
    users = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))), dtype=np.int64)
    widths = class_widths(40)[sequences.lengths]
    parts = cut(users, widths[users], budget)
    assert sorted(np.concatenate([*parts, np.empty(0, dtype=np.int64)]).tolist()) == users.tolist()
    for part in parts:
        assert len(set(widths[part].tolist())) == 1
        assert len(part) == 1 or len(part) * widths[part[0]] <= budget
    widest = [widths[part[0]] for part in parts]
    assert widest == sorted(widest, reverse=True)


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 200), narrowest=st.integers(1, 40), data=st.data())
def test_a_user_who_leaves_changes_the_width_of_nobody_else(
    lengths: list[int], budget: int, narrowest: int, data: st.DataObject
):
    """Else the float32 arithmetic of all others would round differently, and the same way for users who are alike."""
    leaving = data.draw(st.integers(0, len(lengths) - 1))
    without = [0 if user == leaving else length for user, length in enumerate(lengths)]

    def widths(of: list[int]) -> dict[int, int]:
        people, everybody = some_sequences(of), np.arange(len(of))
        batches = micro_batches(people, everybody, max_length=30, token_budget=budget, narrowest=narrowest)
        return {int(user): part.tokens.shape[1] for part in batches for user in part.users if user != leaving}

    assert widths(lengths) == widths(without)


def test_a_class_of_lengths_is_at_most_twice_as_long_and_a_long_one_at_most_four_tenths_longer():
    widths = class_widths(400)
    lengths = np.arange(401)
    assert (widths >= lengths).all()
    assert (widths <= 2 * lengths).all()
    assert (widths[64:] <= 1.4 * lengths[64:]).all()
    assert widths[-1] == 400


def test_no_class_is_narrower_than_the_narrowest_and_none_is_wider_than_a_history():
    for narrowest in (1, 7, 19, 20, 50):
        widths = class_widths(20, narrowest)
        assert (widths >= np.arange(21)).all()
        assert widths[0] == 0
        assert widths[1] >= min(narrowest, 20)
        assert widths[-1] == 20


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 200), rows=st.integers(1, 100), longest=st.integers(1, 12))
def test_a_second_budget_counts_no_more_than_so_much_of_each_user(
    lengths: list[int], budget: int, rows: int, longest: int
):
    sequences = some_sequences(lengths)
    widths = class_widths(40)[sequences.lengths]
    parts = cut(np.arange(len(lengths)), widths, budget, rows, longest)
    assert sorted(user for part in parts for user in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or np.minimum(widths[part], longest).sum() <= rows
    # Where it is never reached, it changes nothing.
    alone = cut(np.arange(len(lengths)), widths, budget)
    ample = cut(np.arange(len(lengths)), widths, budget, budget * longest, longest)
    assert [part.tolist() for part in ample] == [part.tolist() for part in alone]


@settings(deadline=None)
@given(lengths=LENGTHS, max_length=st.integers(1, 30), budget=st.integers(1, 200))
def test_tensors_hold_the_last_items_and_nothing_else(lengths: list[int], max_length: int, budget: int):
    sequences = some_sequences(lengths)
    everybody = np.arange(len(lengths))
    seen = 0
    for part in micro_batches(sequences, everybody, max_length=max_length, token_budget=budget):
        assert part.tokens.dtype == part.lengths.dtype == torch.int64
        assert part.tokens.shape == (len(part.users), class_widths(max_length)[part.lengths[0]])
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


def test_classes_of_length_save_most_of_the_padding():
    sequences = prepare(demo_frame()).sequences
    batch = list(micro_batches(sequences, np.arange(len(sequences)), max_length=50, token_budget=4096))
    positions = sum(part.tokens.numel() for part in batch)
    events = sum(int(part.lengths.sum()) for part in batch)
    assert 1 - events / positions < 0.3
    assert 1 - events / (50 * len(sequences)) > 0.5


@pytest.mark.parametrize(
    "wrong",
    [
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

"""`dpformer reproduce time-split` on an invented log."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dpformer.data import demo_frame, held_out, load
from dpformer_experiments.reproduce import ceiling, time_split
from dpformer_experiments.reproduce.data_sets import fingerprint
from dpformer_experiments.reproduce.runner import Running
from dpformer_experiments.reproduce.time_split import BY_TIME, WHOLE
from small_table import TINY


@pytest.fixture
def events():
    log = demo_frame().drop("title").sort("user_id", maintain_order=True)
    # Days pass at the rate of people: some are before the date, some after it, some on both sides.
    times = np.arange(len(log)) % 997 * time_split.DAY
    return log.with_columns(timestamp=times).select("user_id", "item_id", "timestamp")


def test_the_date_is_the_first_midnight_with_the_share_before_it():
    times = np.random.default_rng(0).integers(10**9, 10**9 + 400 * time_split.DAY, 5000)
    for share in (0.5, 0.9):
        date = np.datetime64(time_split.date_of(times, share), "s").astype(int)
        assert date % time_split.DAY == 0
        assert (times < date).mean() >= share
        assert (times < date - time_split.DAY).mean() < share


def test_the_share_of_items_in_one_session():
    day, hour = time_split.DAY, time_split.HOUR
    times = {"a": [0, day, day + hour], "b": [0, 5, 2 * day], "c": [0, hour, 2 * hour]}
    rows = [{"user_id": user, "item_id": "x", "timestamp": t} for user, own in times.items() for t in own]
    log = pl.DataFrame(rows).sample(fraction=1, shuffle=True, seed=1)
    assert time_split.within_an_hour(log, None) == pytest.approx(2 / 3)  # a and c
    assert time_split.within_an_hour(log, "1970-01-02 00:00:00") == 0  # of a and b; c has nothing after it
    assert time_split.within_an_hour(log, "1970-01-02 00:30:00") == 0.5


def test_both_splits_side_by_side(tmp_path, monkeypatch, events):
    tiny = replace(ceiling.final(WHOLE), options={**TINY, "hold_out": "test"})
    monkeypatch.setattr(ceiling, "final", lambda dataset: tiny)
    monkeypatch.setattr(time_split, "PRESETS", {"DP transitions": ("transitions", 1)})
    how = Running(tmp_path, workers=1)
    figures = time_split.run(how=how, events=events)
    assert figures["failed"] == 0
    assert [row["method"] for row in figures["rows"]] == ["popularity, not private", "DP transitions", ceiling.METHOD]
    places = time_split.folders(how, events)
    # The same sequences under another split are another data set: else one's runs would be taken for the other's.
    assert len({fingerprint(load(place)) for place in places.values()}) == 2
    for name, place in places.items():
        held = held_out(load(place).sequences)
        assert figures["protocols"][name]["people"] == len(held.evaluated)
    assert 0 < figures["protocols"][BY_TIME]["people"] < figures["protocols"][WHOLE]["people"]
    assert 0.9 <= figures["before"] < 0.92
    row = figures["rows"][1]
    assert row["ndcg@10"] != row["leave-one-out ndcg@10"]
    text = time_split.page(figures).markdown()
    assert figures["date"] in text
    assert "| 1 / 1 |" in text
    assert "--preset transitions" in text


def test_private_rows_are_trained_on_all_before_what_is_asked():
    for cell in time_split.cells():
        assert cell.work == "popularity" or cell.recipe.hold_out == "test"
    by_time, whole = ([c.method for c in time_split.cells() if c.dataset == name] for name in (BY_TIME, WHOLE))
    assert by_time == whole

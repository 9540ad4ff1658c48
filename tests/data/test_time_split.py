"""A split by time: train before a public date, test from it on."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.artifact import load as load_artifact
from dpformer.data import held_out, load, prepare, save, statistics
from dpformer.data.split import trained_on
from dpformer.errors import DataError
from dpformer.evaluation import evaluate
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start
from dpformer.trust.verify.ledger import ledger_against_statement

DATE = "2025-02-01"
CUT = 1_738_368_000  # of DATE, in seconds
# Items by person, before and from the date on.
PEOPLE = {"a": ("uvw", "xy"), "b": ("v", "u"), "c": ("", "wx"), "d": ("uv", ""), "e": ("x", "")}


def events(people=PEOPLE, per_second=1):
    rows = [
        {"user_id": user, "item_id": item, "timestamp": (CUT + place - len(early)) * per_second}
        for user, (early, late) in people.items()
        for place, item in enumerate(early + late)
    ]
    return pl.DataFrame(rows).sample(fraction=1, shuffle=True, seed=1)


def split(log=None, date=DATE, **options):
    return prepare(events() if log is None else log, split="time", date=date, **options)


def items_of(dataset, sequences):
    names = ["", *dataset.catalogue["item_id"].to_list()]
    return {
        user: "".join(names[i] for i in items) for user, items in zip(sequences.users.to_list(), sequences, strict=True)
    }


def expected(hold_out):
    """By hand, person by person: everything, what is before the date, or that without its last event."""
    if hold_out == "nothing":
        return {user: early + late for user, (early, late) in PEOPLE.items()}
    return {user: early if hold_out == "test" or len(early) < 2 else early[:-1] for user, (early, _) in PEOPLE.items()}


@pytest.mark.parametrize("hold_out", ["validation", "test", "nothing"])
def test_training_sees_what_is_before_the_date(hold_out):
    dataset = split()
    assert items_of(dataset, dataset.train(hold_out)) == expected(hold_out)


def test_the_held_out_item_is_the_first_from_the_date_on():
    dataset = split()
    held = held_out(dataset.sequences, "test")
    names = dataset.catalogue["item_id"].to_list()
    assert [names[i - 1] for i in held.targets] == ["x", "u"]  # of a and b; the others lack events on one side
    assert held.evaluated.tolist() == [0, 1]
    assert items_of(dataset, held.histories) | {"a": "uvw", "b": "v"} == items_of(dataset, held.histories)
    validation = held_out(dataset.sequences, "validation")
    assert [names[i - 1] for i in validation.targets] == ["w", "v"]  # of a and d
    assert statistics(dataset)["evaluated_users"] == 2


@pytest.mark.parametrize("form", ["seconds", "milliseconds", "dates", "text"])
def test_the_date_means_the_same_in_every_form_of_times(form):
    log = events(per_second=1000 if form == "milliseconds" else 1)
    if form in ("dates", "text"):
        log = log.with_columns(pl.from_epoch("timestamp"))
    if form == "text":
        log = log.with_columns(pl.col("timestamp").dt.strftime("%d.%m.%Y %H:%M:%S"))
    assert split(log).sequences.split.before.tolist() == [3, 1, 0, 2, 1]
    assert split(log, date="2025-02-01T01:00+01:00").sequences.split.before.tolist() == [3, 1, 0, 2, 1]


def test_a_folder_keeps_the_split(tmp_path):
    dataset = split()
    save(dataset, tmp_path / "data")
    again = load(tmp_path / "data")
    assert again.sequences.split.date == "2025-02-01 00:00:00"
    assert again.sequences.split.before.tolist() == dataset.sequences.split.before.tolist()
    assert "--split time --date '2025-02-01 00:00:00'" in again.log["command"]


def test_filters_come_before_the_split():
    """Items outside of a public catalogue are not counted, and a person without events stays."""
    dataset = split(catalogue=pl.DataFrame({"item_id": ["u", "v"]}))
    assert dataset.sequences.split.before.tolist() == [2, 1, 0, 2, 0]
    smaller = split().with_items(["u", "v"])
    assert smaller.sequences.split.before.tolist() == [2, 1, 0, 2, 0]


@settings(max_examples=10, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(st.text("uvw", max_size=4), st.text("uvw", max_size=4)), min_size=2
    )
)
def test_training_on_one_person_depends_on_that_person_alone(people):
    """The guarantee needs it: what is kept of a person is a function of that person's own events and the date."""
    filler = {"y": ("uvw", "uvw"), "z": ("vu", "wu")}
    whole = split(events(people | filler))
    user = next((user for user in people if any(people[user])), "y")
    alone = split(events(filler | {user: (people | filler)[user]}))
    for hold_out in ("validation", "test", "nothing"):
        assert items_of(alone, alone.train(hold_out))[user] == items_of(whole, whole.train(hold_out))[user]


def test_a_run_is_fitted_before_the_date_and_evaluated_after_it(tmp_path):
    rng = np.random.default_rng(0)
    people = {
        f"p{n:03}": ("".join(rng.choice(list("uvwxyz"), 4)), "".join(rng.choice(list("uvwxyz"), 2))) for n in range(60)
    }
    dataset = split(events(people))
    save(dataset, tmp_path / "data")
    seen = []

    def watched(people, *rest):
        from dpformer.privacy import Curator

        seen.append(people)
        return Curator(people, *rest)

    recipe = make_recipe("popularity", hold_out="test", delta=1e-3)
    run = start(tmp_path / "run", tmp_path / "data", recipe, make_curator=watched)
    run.train()
    assert items_of(dataset, seen[0]) == {user: early for user, (early, _) in people.items()}
    statement = run.statement()
    assert "Trained on: each user's events before 2025-02-01 00:00:00 (UTC)." in statement.text()
    assert ledger_against_statement(tmp_path / "run", statement, recipe).good
    line = evaluate(
        load_artifact(tmp_path / "run"), held_out(dataset.sequences), len(dataset.catalogue)
    ).protocol.line()
    assert "first item from 2025-02-01 00:00:00 (UTC) on, from everything before that date" in line
    assert "first item from 2025-02-01" in (tmp_path / "run" / "README.md").read_text()


def test_a_run_of_another_split_is_evaluated_with_a_caution(tmp_path, dpformer):
    """Leave-one-out trains on items that a split by time holds out."""
    people = {f"p{n:02}": ("uvwx", "yz") for n in range(30)}
    save(prepare(events(people)), tmp_path / "whole")
    save(split(events(people)), tmp_path / "split")
    run = start(tmp_path / "run", tmp_path / "whole", make_recipe("popularity", delta=1e-3))
    run.train()
    run.close()
    assert "on another split" not in dpformer("evaluate", tmp_path / "run").err
    assert (
        "on another split; the figures count if"
        in dpformer("evaluate", tmp_path / "run", "--data", tmp_path / "split").err
    )


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"split": "time"}, "split='time' and date go together"),
        ({"date": DATE}, "split='time' and date go together"),
        ({"split": "random", "date": DATE}, "give leave-one-out or time"),
        ({"split": "time", "date": "first of May"}, "write it as 2025-02-01"),
        ({"split": "time", "date": DATE, "no_time": True}, "leave out no_time=True"),
        ({"split": "time", "date": "2031-01-01"}, "give a date between them"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused(options, cure):
    with pytest.raises(DataError, match=cure):
        prepare(events(), **options)


def test_a_log_without_times_cannot_be_split():
    with pytest.raises(DataError, match="has no times"):
        split(events().drop("timestamp"))


def test_the_words_say_what_is_kept():
    assert trained_on("nothing", DATE) == "all events"
    assert "but the last one" in trained_on("validation", DATE)
    assert "but" not in trained_on("test", DATE)

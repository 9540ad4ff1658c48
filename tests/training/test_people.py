"""Records become people: one sample for each, whatever they brought."""

import json
import random

import numpy as np
import pytest
import torch

from dpformer.errors import DataError, PrivacyError
from dpformer.privacy import read_ledger
from dpformer.training.people import group_people
from tests.training.support import WIDTH, Rows, begin, losses, small_model, train

RECORDS = [{"who": name, "x": float(n)} for n, name in enumerate("abacabbd")]


class Columns(list):
    """As a data set of Hugging Face: a column is read at once."""

    column_names = ("who", "x")

    def __getitem__(self, key):
        return [record[key] for record in self] if isinstance(key, str) else super().__getitem__(key)


@pytest.mark.parametrize(
    ("dataset", "person"),
    [(RECORDS, "who"), (RECORDS, lambda record: record["who"]), (RECORDS, list("abacabbd")), (Columns(RECORDS), "who")],
)
def test_records_are_grouped_in_the_order_of_their_first(dataset, person):
    people = group_people(dataset, person, 2)
    assert len(people) == 4
    assert [[record["x"] for record in people[k, 0]] for k in range(4)] == [[0, 2], [1, 5], [3], [7]]
    assert group_people(dataset, person, 2, combine=lambda own: own[-1])[1, 0]["x"] == 5


def test_one_of_a_persons_records_in_each_step():
    people = group_people(RECORDS, "who", 10, combine=random.choice)
    seen = {people[0, seed]["x"] for seed in range(60)}
    assert seen == {0, 2, 4}
    assert people[0, 7] == people[0, 7]


def test_what_is_wrong_with_records_is_said():
    with pytest.raises(DataError, match="give the greatest number"):
        group_people(RECORDS, "who")
    with pytest.raises(DataError, match="no key 'user'"):
        group_people(RECORDS, "user", 2)
    with pytest.raises(DataError, match="7 ids for 8 records"):
        group_people(RECORDS, list("abacabb"), 2)
    with pytest.raises(DataError, match="record 2 has no person"):
        group_people(RECORDS, ["a", "b", None, "c", "a", "b", "b", "d"], 2)
    with pytest.raises(DataError, match="give person= too"):
        group_people(RECORDS, None, 2)


def test_a_person_with_many_records_counts_once(tmp_path):
    """The statement is for people, and a person's records make one loss, whose gradient is clipped once."""
    rows = torch.randn(90, WIDTH)
    ids = [k % 45 for k in range(90)]
    options = {"person": ids, "records_per_person": 2, "combine": lambda own: (0, torch.stack(own).mean(0))}
    private = begin(tmp_path / "run", small_model(), dataset=rows, batch_size=20, **options)
    for batch in private:
        assert len(batch[1]) <= 7
        private.step(lambda batch=batch: losses(private.model, batch))
    assert private.plan.users == 45
    assert "at most 2 records of each person" in private.statement.text()


def test_the_folder_does_not_say_how_many_records_there_are(tmp_path):
    """With a declared population, one person or record more changes neither settings nor statement nor the ledger's plan."""
    kept = []
    for people in (60, 61):
        private = begin(tmp_path / str(people), dataset=Rows(people), population=100)
        train(private)
        statement = json.loads((private.run / "privacy.json").read_text())
        del statement["ledger"]  # a random id, and the hash of keyed tags
        kept.append(((private.run / "training.json").read_text(), statement, read_ledger(private.run).plan))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("ids", [torch.tensor([0, 0, 1, 0]), list(np.array([[0], [0], [1], [0]]).squeeze(1))])
def test_ids_are_compared_by_value(ids):
    """A tensor is another key of a dict each time: every record would be a person."""
    people = group_people(list(range(4)), list(ids), 4, sum)
    assert people.records == [[0, 1, 3], [2]]


def test_ids_that_have_no_value_are_refused():
    with pytest.raises(DataError, match="an id of a person is a object"):
        group_people(list(range(2)), [object(), object()], 4, sum)


@pytest.mark.parametrize(
    "draw", [torch.rand, np.random.rand, lambda n: random.random()], ids=["torch", "numpy", "python"]
)
def test_random_numbers_that_people_share_are_refused(draw, tmp_path):
    """In the collate function and in the losses: one person's leaving would change those of all others."""

    def collate(samples):
        draw(1)
        return torch.utils.data.default_collate(samples)

    with pytest.raises(PrivacyError, match="collate_fn drew random numbers"):
        next(iter(begin(tmp_path / "collated", collate_fn=collate)))
    private = begin(tmp_path / "run")
    batch = next(iter(private))

    def noisy():
        draw(1)
        return losses(private.model, batch)

    with pytest.raises(PrivacyError, match="the losses drew random numbers"):
        private.step(noisy)
    assert read_ledger(private.run).steps_charged == 0


def test_a_buffer_that_is_not_saved_is_watched(tmp_path):
    model = small_model()
    model.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
    private = begin(tmp_path / "run", model)

    def step(batch):
        model.mean += 1
        private.step(lambda: losses(model, batch))

    with pytest.raises(PrivacyError, match="'mean' of the model has changed outside of the steps"):
        list(map(step, private))
    assert read_ledger(private.run).steps_charged == 0

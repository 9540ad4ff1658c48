"""People of a data set: one entry each, however many records they brought, and a loader that takes what the Curator drew.

A person's random numbers (augmentation, a choice among records) come from a seed of that person and step. So one person's
leaving changes no other's, and a step that is made again after a crash gets the same batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from dpformer.errors import DataError, PrivacyError
from dpformer.training.randomness import random_states, same_states, seeded
from dpformer.training.shapes import OneShape

Place = tuple[int, int]
ONE_ENTRY_EACH = (
    "each entry of the data set is another person (person= was not given): a person with two entries counts as two"
)


class People(Dataset[Any]):
    """The people of a map-style data set. An index is a person's place and the seed of the person's random numbers.

    records: of a person, by place: numbers of the data set's records; None where each record is a person.
    combine: makes one sample of a person's records; a list of them by default.
    """

    def __init__(
        self, dataset: Any, records: list[list[int]] | None = None, combine: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self.dataset, self.records, self.combine = dataset, records, combine

    def __len__(self) -> int:
        return len(self.dataset) if self.records is None else len(self.records)

    def __getitem__(self, index: Place) -> Any:
        place, seed = index
        with seeded(seed):
            if self.records is None:
                return self.dataset[place]
            own = [self.dataset[k] for k in self.records[place]]
            return own if self.combine is None else self.combine(own)


def group_people(
    dataset: Any,
    person: str | Callable[[Any], Any] | Sequence[Any] | None = None,
    records_per_person: int | None = None,
    combine: Callable[[list[Any]], Any] | None = None,
    collated: bool = True,
) -> People:
    """People of a data set of people (no `person`), or of records that are grouped by `person`, in the order of their first.

    person: a column of the records, a function of a record, or one id for each record. records_per_person: the greatest number
    that a person may bring; the person's later records are left out. collated: a function of the caller's takes lists of records.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"the data set is a {type(dataset).__name__} without __getitem__ and __len__: people are drawn by their place, each "
            "independently, so a stream will not do. Give a map-style data set"
        )
    if person is None:
        if records_per_person is not None or combine is not None:
            raise DataError("records_per_person and combine are for records: give person= too, or leave them out")
        return People(dataset)
    if records_per_person is None or records_per_person < 1:
        raise DataError(f"records_per_person is {records_per_person}; give the greatest number that a person may bring")
    if records_per_person > 1 and combine is None and not collated:
        raise DataError("several records per person need combine= or collate_fn=, which make one sample of them")
    ids = _ids(dataset, person)
    if len(ids) != len(dataset):
        raise DataError(f"person has {len(ids):,} ids for {len(dataset):,} records; give one for each")
    own: dict[Any, list[int]] = {}
    for row, name in enumerate(map(_plain, ids)):
        if name is None or name != name:
            raise DataError(f"record {row} has no person; leave it out of the data set, or give it one")
        records = own.setdefault(name, [])
        if len(records) < records_per_person:
            records.append(row)
    return People(dataset, list(own.values()), combine)


def _plain(name: Any) -> Any:
    """An id that is equal to itself. Tensors are compared by identity: each would be another person."""
    if isinstance(name, torch.Tensor | np.ndarray) and len(np.shape(name)) == 0:
        name = name.item()
    if isinstance(name, tuple):
        return tuple(map(_plain, name))
    if name is not None and not isinstance(name, str | bytes | int | float | np.generic):
        raise DataError(f"an id of a person is a {type(name).__name__}; give texts or numbers, such as str(id)")
    return name


def _ids(dataset: Any, person: str | Callable[[Any], Any] | Sequence[Any]) -> Sequence[Any]:
    if callable(person):
        return [person(dataset[k]) for k in range(len(dataset))]
    if not isinstance(person, str):
        return list(person)
    if person in getattr(dataset, "column_names", ()):  # of Hugging Face's data sets, without reading the other columns
        return list(dataset[person])
    try:
        return [dataset[k][person] for k in range(len(dataset))]
    except (KeyError, TypeError, IndexError):
        cure = "give person= a function of a record"
        if person in getattr(dataset, "columns", ()):
            cure = "a DataFrame is not indexed by rows: give frame.to_dict('records')"
        raise DataError(f"the records have no key {person!r}; {cure}") from None


class Collate:
    """Makes a batch by the caller's function, which must draw no random numbers: all people of the batch would share them.

    It must give each person alone the same shape as among others (`shapes`).
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function, self._shape = function, OneShape()

    def __call__(self, samples: list[Any]) -> Any:
        before = random_states()
        batch = self.function(samples)
        # torch's own takes people of equal shapes only: one of them is enough.
        alone = samples[:1] if self.function is default_collate else samples
        for one in (batch, *(self.function([sample]) for sample in alone)):
            self._shape.check(one)
        if not same_states(before, random_states()):
            raise PrivacyError(
                "collate_fn drew random numbers: one person leaving would change those of all others. Draw them in the data set "
                "or in combine=, where each person has a seed of their own"
            )
        return batch


class Loader:
    """Batches of the people drawn, by torch's DataLoader; its workers stay from step to step."""

    def __init__(self, people: People, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int) -> None:
        self._places: list[list[Place]] = []
        # A generator of its own: the loader draws from torch's otherwise.
        self._loader = DataLoader(
            people,
            batch_sampler=self._places,
            collate_fn=Collate(collate_fn or default_collate),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),
        )

    def batches(self, parts: list[np.ndarray], key: bytes) -> Iterator[Any]:
        """One batch for each part, whose people are given by their places. key: of this step's random numbers."""
        self._places[:] = [[(int(place), _seed(key, int(place))) for place in part] for part in parts]
        return iter(self._loader)


def _seed(key: bytes, place: int) -> int:
    return int.from_bytes(hashlib.sha256(key + b"sample %d" % place).digest()[:8], "little") >> 1

"""Everybody's items in time order, in two flat arrays: 50 million events take 200 MB and no Python object each."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

# One item to test, one to validate, and at least one to go by.
SHORTEST_SPLIT = 3
# What may be held out of training, and how many items at the end of a sequence that takes.
HELD_OUT = {"nothing": 0, "test": 1, "validation": 2}


@dataclass(frozen=True)
class Sequences:
    """One sequence a user, oldest item first.

    users: ids, [N]; items: int32 [events], numbers 1..M of the catalogue (0 is left for padding);
    offsets: int64 [N + 1]; the items of user n are `items[offsets[n] : offsets[n + 1]]`. A user may have no items.
    """

    users: pl.Series
    items: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, user: int) -> np.ndarray:
        """The items of the user at this place (not id), int32 [length]."""
        if not 0 <= user < len(self):
            raise IndexError(f"user {user} of {len(self)}")
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[user] for user in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]."""
        return np.diff(self.offsets)

    def renumbered(self, numbers: np.ndarray) -> "Sequences":
        """The same users with item i as `numbers[i]`, int [M + 1]; items with the number 0 are dropped.

        A user may be left without items. Users keep their places: one user is still one sequence.
        """
        items = numbers[self.items]
        kept = items != 0
        return Sequences(self.users, items[kept].astype(np.int32), starts(kept)[self.offsets])

    def without_last(self, count: int) -> "Sequences":
        """The sequences without the last `count` items of every user who has three."""
        long = self.lengths >= SHORTEST_SPLIT
        kept = np.ones(len(self.items), dtype=bool)
        for place in range(1, count + 1):
            kept[self.offsets[1:][long] - place] = False
        return Sequences(self.users, self.items[kept], starts(self.lengths - count * long))

    def frame(self) -> pl.DataFrame:
        """`user_id` and `items` (a list, which may be empty), one row a user."""
        people = pl.DataFrame({"user": np.arange(len(self), dtype=np.int32)})
        events = pl.DataFrame({"user": np.repeat(people["user"].to_numpy(), self.lengths), "items": self.items})
        lists = events.with_columns(pl.col("user").set_sorted()).group_by("user", maintain_order=True).agg("items")
        nothing = pl.lit([], dtype=lists.schema["items"])
        everybody = people.join(lists, on="user", how="left", maintain_order="left")
        return everybody.select(self.users.alias("user_id"), pl.col("items").fill_null(nothing))

    @classmethod
    def from_frames(cls, frames: Iterable[pl.DataFrame]) -> "Sequences":
        """What `frame` wrote, in one or several parts, whose users follow one another.

        Memory holds the result and one part: the array of items grows in place.
        """
        users: list[pl.Series] = []
        lengths: list[np.ndarray] = []
        items = np.empty(0, dtype=np.int32)
        for frame in frames:
            users.append(frame["user_id"])
            lengths.append(frame["items"].list.len().to_numpy().astype(np.int64))
            part = flat(frame["items"]).to_numpy()
            items.resize(len(items) + len(part), refcheck=False)
            items[len(items) - len(part) :] = part
        return cls(pl.concat(users), items, starts(np.concatenate(lengths)))


def starts(lengths: np.ndarray) -> np.ndarray:
    """Where parts of these lengths begin when they follow one another, and where the last ends; int64 [N + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def flat(lists: pl.Series) -> pl.Series:
    """The entries of all lists; an empty list gives none (`explode` alone would give a null)."""
    return lists.filter(lists.list.len() > 0).explode()


@dataclass(frozen=True)
class Dataset:
    """Sequences ready to train on.

    sequences: one a user; private. catalogue: `item` (1..M), `item_id` and, where known, `title`, in the order of the
    ids, and further columns of a public catalogue: no counts, because it goes out with a model.
    manifest: input, options, counts, notes; private.
    """

    sequences: Sequences
    catalogue: pl.DataFrame
    manifest: dict[str, Any]

    @property
    def catalogue_mode(self) -> str:
        """How the set of items was decided: "public", "log" or "private"; see `catalogue`."""
        return str(self.manifest.get("catalogue", {}).get("mode", "log"))

    @property
    def outside_guarantee(self) -> list[str]:
        """What was done to the events that the guarantee does not cover, in sentences."""
        if "outside_guarantee" not in self.manifest and self.manifest.get("options", {}).get("min_events", 0) > 1:
            return ["users and items were filtered by --min-events, which counts over people"]  # by an older version
        return list(self.manifest.get("outside_guarantee", []))

    def train(self, hold_out: str) -> Sequences:
        """What training sees: all but the last two items ("validation" and what follows), all but the last ("test"), or all
        ("nothing").
        """
        return self.sequences.without_last(HELD_OUT[hold_out])

    def numbers_in(self, catalogue: pl.DataFrame) -> np.ndarray:
        """The number that each item 1..M has in another catalogue, by its id as text, int64 [M + 1]; 0 where it has none."""
        return np.concatenate(
            [np.zeros(1, dtype=np.int64), numbers_of(self.catalogue["item_id"], catalogue["item_id"])]
        )

    def with_items(self, ids: Collection[Any]) -> "Dataset":
        """The same users with these items only, numbered anew; other events are dropped."""
        kept = self.catalogue.filter(pl.col("item_id").is_in(list(ids)))
        chosen = kept.with_columns(item=pl.int_range(1, len(kept) + 1, dtype=pl.Int32))
        return self.in_catalogue(chosen)

    def in_catalogue(self, catalogue: pl.DataFrame) -> "Dataset":
        """The same users with the items of another catalogue; events of other items are dropped."""
        return Dataset(self.sequences.renumbered(self.numbers_in(catalogue)), catalogue, self.manifest)

    def names(self) -> list[str]:
        """What to call the items 1..M: title, else id; place 0 is the padding."""
        ids = self.catalogue["item_id"].cast(pl.String)
        shown = self.catalogue["title"].fill_null(ids) if "title" in self.catalogue.columns else ids
        return ["", *shown.to_list()]


def numbers_of(ids: pl.Series, catalogue: pl.Series) -> np.ndarray:
    """The number 1..M of each id in a catalogue's ids, matched by text; 0 for an id that is not there. int64 [ids]."""
    numbers = pl.DataFrame({"id": catalogue.cast(pl.String), "number": np.arange(1, len(catalogue) + 1)})
    texts = pl.DataFrame({"id": ids.cast(pl.String)})
    found = texts.join(numbers.unique("id", keep="last"), on="id", how="left", maintain_order="left")
    return found["number"].fill_null(0).to_numpy()

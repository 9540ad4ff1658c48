"""All users' items in time order, in two flat arrays: 50 million events take 200 MB."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dpformer.data.options import PREPARING, prepare_command

# Smallest length to evaluate: one item for testing, one for validation, and one to predict from.
SHORTEST_SPLIT = 3
# What can be held out of training, and the number of items that are then missing at the end of a sequence.
HELD_OUT = {"nothing": 0, "test": 1, "validation": 2}


@dataclass(frozen=True)
class TimeSplit:
    """Train before a date, test from it on. date: public, UTC. before: int64 [N], the number of each user's items before it."""

    date: str
    before: np.ndarray


@dataclass(frozen=True)
class Sequences:
    """One sequence per user, oldest item first.

    users: ids, [N]; items: int32 [events], numbers 1..M of the catalogue (0 is padding);
    offsets: int64 [N + 1]; the items of user n are `items[offsets[n] : offsets[n + 1]]`. A user may have no items.
    split: by time; None: leave-one-out.
    """

    users: pl.Series
    items: np.ndarray
    offsets: np.ndarray
    split: TimeSplit | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, user: int) -> np.ndarray:
        """Return the items of the user at this index (not id), int32 [length]."""
        if not 0 <= user < len(self):
            raise IndexError(f"user {user} of {len(self)}")
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[user] for user in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]."""
        return np.diff(self.offsets)

    def places(self, users: Iterable[Any] | None) -> tuple[np.ndarray, list[Any]]:
        """Indices of users by their ids, compared as text, int64; and the ids that are not there. None: all users."""
        if users is None:
            return np.arange(len(self)), []
        asked = list(users)
        numbers = numbers_of(pl.Series([str(user) for user in asked], dtype=pl.String), self.users)
        return numbers[numbers > 0] - 1, [user for user, number in zip(asked, numbers, strict=True) if not number]

    def renumbered(self, numbers: np.ndarray) -> "Sequences":
        """Replace item i by `numbers[i]`, int [M + 1]; items with number 0 are dropped. All users stay."""
        items = numbers[self.items]
        kept = items != 0
        place, split = starts(kept), None
        if self.split is not None:
            first = self.offsets[:-1]
            split = TimeSplit(self.split.date, place[first + self.split.before] - place[first])
        return Sequences(self.users, items[kept].astype(np.int32), place[self.offsets], split)

    def first(self, counts: np.ndarray) -> "Sequences":
        """Keep the first `counts` items of the users, int64 [N]."""
        kept = np.arange(len(self.items)) < np.repeat(self.offsets[:-1] + counts, self.lengths)
        return Sequences(self.users, self.items[kept], starts(counts))

    def training(self, hold_out: str) -> "Sequences":
        """The items to train on. Each user's are a function of that user's own items, and of a public date.

        Leave-one-out: without the last two items ("validation"), without the last ("test"), or all ("nothing"); users with
        fewer than three keep all. By time: the items before the date but the last one (users with one keep it), the items
        before the date, or all.
        """
        count = HELD_OUT[hold_out]
        if self.split is None:
            return self.first(self.lengths - count * (self.lengths >= SHORTEST_SPLIT))
        before = self.split.before
        return self.first([self.lengths, before, before - (before > 1)][count])

    def frame(self) -> pl.DataFrame:
        """Return a frame with `user_id`, `items` (a list, which may be empty) and, split by time, `before`; one row per user."""
        people = pl.DataFrame({"user": np.arange(len(self), dtype=np.int32)})
        events = pl.DataFrame({"user": np.repeat(people["user"].to_numpy(), self.lengths), "items": self.items})
        lists = events.with_columns(pl.col("user").set_sorted()).group_by("user", maintain_order=True).agg("items")
        nothing = pl.lit([], dtype=lists.schema["items"])
        complete = people.join(lists, on="user", how="left", maintain_order="left")
        before = [] if self.split is None else [pl.Series("before", self.split.before)]
        return complete.select(self.users.alias("user_id"), pl.col("items").fill_null(nothing), *before)

    @classmethod
    def from_frame(cls, frame: pl.DataFrame, date: str | None = None) -> "Sequences":
        """Read what `frame` wrote. date: of a split by time."""
        lengths = frame["items"].list.len().to_numpy().astype(np.int64)
        split = None if date is None else TimeSplit(date, frame["before"].to_numpy().astype(np.int64))
        return cls(frame["user_id"], flat(frame["items"]).to_numpy(), starts(lengths), split)


def starts(lengths: np.ndarray) -> np.ndarray:
    """Return where parts of these lengths start, and where the last one ends; int64 [N + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def flat(lists: pl.Series) -> pl.Series:
    """Join all lists; an empty list gives nothing (`explode` alone would give a null)."""
    return lists.filter(lists.list.len() > 0).explode()


@dataclass(frozen=True)
class Dataset:
    """Sequences ready for training, as `prepare` returns them.

    sequences: one per user; private. catalogue: `item` (1..M), `item_id`, `title` if there are titles, and further columns of a
    public catalogue, sorted by id; it has no counts, because it is published with a model.
    manifest: input, options, counts, notes; private.
    """

    sequences: Sequences
    catalogue: pl.DataFrame
    manifest: dict[str, Any]

    @property
    def catalogue_mode(self) -> str:
        """How the set of items was decided: "public", "log" or "private"; see `Options.catalogue`."""
        return str(self.manifest.get("catalogue", {}).get("mode", "log"))

    @property
    def log(self) -> dict[str, Any]:
        """How the log was read and filtered, for `like`; the date of a split; the command. Published with a model."""
        options = {name: value for name, value in self.manifest.get("options", {}).items() if value}
        date = {"date": options["date"]} if "date" in options else {}
        title = self.manifest.get("input", {}).get("columns", {}).get("title")
        options |= {"title": title} if title is not None and self.catalogue_mode == "log" else {}
        preparing = {name: options[name] for name in PREPARING if name in options}
        reading = self.manifest.get("reading", {})
        return {**reading, "preparing": preparing, **date, "command": prepare_command(self.manifest)}

    @property
    def features(self) -> str:
        """The columns of the catalogue by which rare and new items are scored; see `Options.features`."""
        given = str(self.manifest.get("options", {}).get("features", ""))
        return given if self.catalogue_mode == "public" else ""

    @property
    def outside_guarantee(self) -> list[str]:
        """Filters and titles that the guarantee does not cover, in sentences."""
        return list(self.manifest.get("outside_guarantee", []))

    def train(self, hold_out: str) -> Sequences:
        """Return the training items; see `Sequences.training`."""
        return self.sequences.training(hold_out)

    def numbers_in(self, catalogue: pl.DataFrame) -> np.ndarray:
        """Map item i to its number in another catalogue, matched by id as text; 0 if missing. int64 [M + 1]."""
        return np.concatenate(
            [np.zeros(1, dtype=np.int64), numbers_of(self.catalogue["item_id"], catalogue["item_id"])]
        )

    def with_items(self, ids: Collection[Any]) -> "Dataset":
        """Keep only the items with these ids, renumber them, and drop other events."""
        kept = self.catalogue.filter(pl.col("item_id").is_in(list(ids)))
        chosen = kept.with_columns(item=pl.int_range(1, len(kept) + 1, dtype=pl.Int32))
        return self.in_catalogue(chosen)

    def in_catalogue(self, catalogue: pl.DataFrame) -> "Dataset":
        """Renumber items as in another catalogue, and drop events of other items."""
        return Dataset(self.sequences.renumbered(self.numbers_in(catalogue)), catalogue, self.manifest)

    def names(self) -> list[str]:
        """Return titles of items 1..M, or ids where there is no title; index 0 is padding."""
        ids = self.catalogue["item_id"].cast(pl.String)
        shown = self.catalogue["title"].fill_null(ids) if "title" in self.catalogue.columns else ids
        return ["", *shown.to_list()]


def numbers_of(ids: pl.Series, catalogue: pl.Series) -> np.ndarray:
    """Return the number 1..M of each id in a catalogue's ids, matched by text; 0 if missing. int64 [ids]."""
    numbers = pl.DataFrame({"id": catalogue.cast(pl.String), "number": np.arange(1, len(catalogue) + 1)})
    texts = pl.DataFrame({"id": ids.cast(pl.String)})
    matched = texts.join(numbers.unique("id", keep="last"), on="id", how="left", maintain_order="left")
    return matched["number"].fill_null(0).to_numpy()

"""What `prepare` makes: sequences, catalogue, and the manifest that says where they come from."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dpformer.data.sequences import Sequences
from dpformer.data.split import Split, split, without_last


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

    def split(self) -> Split:
        """Last item for the test, second to last for validation, the rest for training."""
        return split(self.sequences)

    def train(self, hold_out: str) -> Sequences:
        """What training sees: all but the last two items ("validation" and what follows), all but the last ("test"), or all
        ("nothing").
        """
        return without_last(self.sequences, {"validation": 2, "test": 1, "nothing": 0}[hold_out])

    def numbers_in(self, catalogue: pl.DataFrame) -> np.ndarray:
        """The number that each item 1..M has in another catalogue, by its id as text, int64 [M + 1]; 0 where it has none."""
        other = {text: number for number, text in enumerate(catalogue["item_id"].cast(pl.String).to_list(), 1)}
        own = self.catalogue["item_id"].cast(pl.String).to_list()
        return np.array([0, *(other.get(text, 0) for text in own)], dtype=np.int64)

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

"""What `prepare` makes: sequences, catalogue, and the manifest that says where they come from."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from dpformer.data.sequences import Sequences
from dpformer.data.splits import Split, split, without_last


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
        return list(self.manifest.get("outside_guarantee", []))

    def split(self) -> Split:
        """Last item for the test, second to last for validation, the rest for training."""
        return split(self.sequences)

    def train(self, hold_out: str) -> Sequences:
        """What training sees: all but the last two items ("validation" and what follows), all but the last ("test"), or all
        ("nothing").
        """
        return without_last(self.sequences, {"validation": 2, "test": 1, "nothing": 0}[hold_out])

    def names(self) -> list[str]:
        """What to call the items 1..M: title, else id; place 0 is the padding."""
        ids = self.catalogue["item_id"].cast(pl.String)
        shown = self.catalogue["title"].fill_null(ids) if "title" in self.catalogue.columns else ids
        return ["", *shown.to_list()]

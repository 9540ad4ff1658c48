"""Which items there are, and what they are called."""

import numpy as np
import polars as pl

from dpformer.data.columns import ITEM, TITLE
from dpformer.data.log import Log


def title_spread(item: pl.Expr, frame: pl.LazyFrame) -> pl.LazyFrame:
    """The first and the `last` title of each item (`item` reads its id) in events."""
    return (
        frame.select(item.cast(pl.String).alias(ITEM), pl.col(TITLE).cast(pl.String))
        .filter(pl.col(TITLE) != "")
        .group_by(ITEM)
        .agg(pl.col(TITLE).min(), last=pl.col(TITLE).max())
    )


def judged_titles(log: Log, spread: pl.DataFrame, notes: list[str]) -> pl.DataFrame | None:
    """The titles of the items, if the column names items at all.

    spread: `item_id` as text, sorted, and the first and `last` title of each, in their order.
    A title goes into the catalogue, which is released. A column that differs between events of one item was written
    by people (the headline of a review, say), and must not.
    """
    differing = spread.filter(pl.col(TITLE) != pl.col("last"))
    if len(differing):
        notes.append(
            f"column {log.columns[TITLE]!r} differs between events of one item (first: {differing[ITEM][0]}), so it "
            "does not name items and is left out"
        )
        return None
    return spread.drop("last")


def make_catalogue(ids: pl.Series, titles: pl.DataFrame | None) -> pl.DataFrame:
    """Items 1..M with their ids, in the order of `ids`, and their titles where these are known."""
    catalogue = pl.DataFrame({"item": np.arange(1, len(ids) + 1, dtype=np.int32), ITEM: ids})
    if titles is None:
        return catalogue
    named = titles.select(key=pl.col(ITEM).cast(pl.String), title=pl.col(TITLE)).unique("key", keep="first")
    return catalogue.join(
        named, left_on=pl.col(ITEM).cast(pl.String), right_on="key", how="left", maintain_order="left"
    ).select("item", ITEM, TITLE)

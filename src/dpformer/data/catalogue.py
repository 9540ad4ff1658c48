"""Which items there are, and what they are called."""

import numpy as np
import polars as pl

from dpformer.data.columns import ITEM, TITLE, USER
from dpformer.data.log import Log


def title_votes(item: pl.Expr, user: pl.Expr, frame: pl.LazyFrame) -> pl.LazyFrame:
    """Who has which title for which item: `item_id`, `title` and `user_id` as text, each combination once.

    item, user: expressions that read the ids of events.
    """
    columns = {ITEM: item, TITLE: pl.col(TITLE), USER: user}
    texts = frame.select(expression.cast(pl.String).alias(role) for role, expression in columns.items())
    return texts.filter(pl.col(TITLE) != "").unique()


def chosen_titles(counted: pl.DataFrame) -> pl.DataFrame:
    """`item_id` and `title`: for each item the title that most of its people have; of equals the smallest text.

    counted: `item_id`, `title` and `people`, how many people have this title for this item.
    """
    ranked = counted.sort(ITEM, "people", TITLE, descending=[False, True, False])
    return ranked.unique(ITEM, keep="first", maintain_order=True).select(ITEM, TITLE)


def title_notes(log: Log) -> list[str]:
    """The note about a column that looks like titles and was not asked for, if there is one."""
    name = log.unused_title
    if name is None:
        return []
    cure = f"give --title {name} if it names items (it will be published), or --catalogue FILE"
    return [f"column {name!r} is not used: {cure}"]


def make_catalogue(ids: pl.Series, titles: pl.DataFrame | None) -> pl.DataFrame:
    """Items 1..M with their ids, in the order of `ids`, and their titles where these are known."""
    catalogue = pl.DataFrame({"item": np.arange(1, len(ids) + 1, dtype=np.int32), ITEM: ids})
    if titles is None:
        return catalogue
    named = titles.select(key=pl.col(ITEM).cast(pl.String), title=pl.col(TITLE)).unique("key", keep="first")
    return catalogue.join(
        named, left_on=pl.col(ITEM).cast(pl.String), right_on="key", how="left", maintain_order="left"
    ).select("item", ITEM, TITLE)

"""Embedded data: an invented library and its readers, the same on every machine.

500 books in 50 series of 10 volumes. Readers pick by taste from a long tail (Zipf), and then tend to read on: the next
volume of what they just read, or back to a series that they left. So the last item tells the next one far better than
popularity does, and a sequence model has something to learn. Nobody is real.

Every draw is a uniform number put through a table, because the plain stream of PCG64 is what NumPy keeps the same
between versions.
"""

import numpy as np
import polars as pl

USERS, SERIES, VOLUMES = 3000, 50, 10
_PLACES = ("Harbour", "Glass", "Copper", "Winter", "Salt", "Orchard", "Lantern", "River", "Marble", "Thunder")
_KINDS = ("Mysteries", "Chronicles", "Voyages", "Letters", "Gardens")
_READ_ON, _RETURN = 0.55, 0.15


def demo_frame() -> pl.DataFrame:
    """The log: `user_id`, `item_id`, `timestamp` (seconds) and `title`, in the order of time."""
    rng = np.random.Generator(np.random.PCG64(20240229))
    popularity = 1.0 / np.arange(1, SERIES + 1) ** 1.1
    # Volume 1 is where most begin.
    volume_weights = 1.0 / np.arange(1, VOLUMES + 1) ** 1.5
    volume_table = np.cumsum(volume_weights / volume_weights.sum())
    users, items, times = [], [], []
    for user in range(USERS):
        # A reader likes one kind of series three times as much as the others.
        kind = int(rng.random() * len(_KINDS))
        weights = popularity * np.where(np.arange(SERIES) % len(_KINDS) == kind, 3.0, 1.0)
        series_table = np.cumsum(weights / weights.sum())
        # Lengths from 3 up, with a tail: most read about ten books, a few read a hundred.
        length = min(150, 3 + int(-14.0 * np.log1p(-rng.random())))
        clock = 1_577_836_800 + int(rng.random() * 86_400 * 300)
        volumes = _read(rng, length, series_table, volume_table)
        gaps = np.cumsum(3600 + (rng.random(length) * 86_400 * 20).astype(np.int64))
        users.append(np.full(length, user))
        items.append(volumes)
        times.append(clock + gaps)
    log = pl.DataFrame(
        {"user": np.concatenate(users), "item": np.concatenate(items), "timestamp": np.concatenate(times)}
    )
    titles = _titles()
    return log.sort("timestamp", maintain_order=True).select(
        user_id=pl.format("reader-{}", pl.col("user").cast(pl.String).str.zfill(4)),
        item_id=pl.format("book-{}", pl.col("item").cast(pl.String).str.zfill(3)),
        timestamp=pl.col("timestamp"),
        title=pl.col("item").replace_strict(list(range(len(titles))), titles, return_dtype=pl.String),
    )


def demo_items() -> pl.DataFrame:
    """The library's books, `item_id` and `title`: invented, so public."""
    titles = _titles()
    return pl.DataFrame({"item_id": [f"book-{book:03}" for book in range(len(titles))], "title": titles})


def _read(rng: np.random.Generator, length: int, series_table: np.ndarray, volume_table: np.ndarray) -> np.ndarray:
    """One reader's books, int64 [length]: book = series * VOLUMES + volume."""
    books = np.empty(length, dtype=np.int64)
    left: dict[int, int] = {}
    series = volume = -1
    for step in range(length):
        choice = rng.random()
        if step and choice < _READ_ON and volume + 1 < VOLUMES:
            volume += 1
        elif step and choice > 1 - _RETURN and len(left) > 1:
            back = [other for other in left if other != series and left[other] + 1 < VOLUMES]
            series = back[int(rng.random() * len(back))] if back else series
            volume = min(left[series] + 1, VOLUMES - 1)
        else:
            series = min(int(np.searchsorted(series_table, rng.random())), SERIES - 1)
            volume = min(int(np.searchsorted(volume_table, rng.random())), VOLUMES - 1)
        left[series] = volume
        books[step] = series * VOLUMES + volume
    return books


def _titles() -> list[str]:
    return [
        f"The {_PLACES[series // len(_KINDS)]} {_KINDS[series % len(_KINDS)]}, vol. {volume}"
        for series in range(SERIES)
        for volume in range(1, VOLUMES + 1)
    ]

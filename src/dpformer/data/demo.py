"""Embedded demo data: an invented library and its readers, the same on every machine.

500 books in 50 series of 10 volumes. Popularity is long-tailed (Zipf). Readers tend to continue with the next volume, or
to return to a series that they started. So the last item predicts the next one far better than popularity does.

Each draw is a uniform number looked up in a table: NumPy keeps only the plain stream of PCG64 equal between versions.
"""

import numpy as np
import polars as pl

USERS, SERIES, VOLUMES = 3000, 50, 10
_PLACES = ("Harbour", "Glass", "Copper", "Winter", "Salt", "Orchard", "Lantern", "River", "Marble", "Thunder")
_KINDS = ("Mysteries", "Chronicles", "Voyages", "Letters", "Gardens")
_READ_ON, _RETURN = 0.55, 0.15


def demo_frame() -> pl.DataFrame:
    """Return the log: `user_id`, `item_id`, `timestamp` (seconds) and `title`, sorted by time."""
    rng = np.random.Generator(np.random.PCG64(20240229))
    popularity = 1.0 / np.arange(1, SERIES + 1) ** 1.1
    # Most readers start with volume 1.
    volume_weights = 1.0 / np.arange(1, VOLUMES + 1) ** 1.5
    volume_table = np.cumsum(volume_weights / volume_weights.sum())
    users, items, times = [], [], []
    for user in range(USERS):
        # Each reader prefers one kind of series three to one.
        kind = int(rng.random() * len(_KINDS))
        weights = popularity * np.where(np.arange(SERIES) % len(_KINDS) == kind, 3.0, 1.0)
        series_table = np.cumsum(weights / weights.sum())
        # At least 3 books; most readers have about ten, a few a hundred.
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
    """Return the books, `item_id` and `title`. They are invented, so the catalogue is public."""
    titles = _titles()
    return pl.DataFrame({"item_id": [f"book-{book:03}" for book in range(len(titles))], "title": titles})


def _read(rng: np.random.Generator, length: int, series_table: np.ndarray, volume_table: np.ndarray) -> np.ndarray:
    """Draw the books of one reader, int64 [length]: book = series * VOLUMES + volume."""
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

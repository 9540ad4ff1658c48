"""Data sets by name: source, hash, expected sizes, and the paper's filter.

The package contains none of this data: it is downloaded into a cache, or read from a path that you give.
"""

import io
import os
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data.catalogue import make_catalogue
from dpformer.data.demo import demo_frame, demo_items
from dpformer.data.prepare import prepare
from dpformer.data.sequences import Dataset
from dpformer.errors import DataError
from dpformer.files import sha256_of, write_file

# Smallest number of events per user and item in the paper's data, counted once.
MIN_EVENTS = 5


@dataclass(frozen=True)
class NamedSet:
    """A public data set.

    url: the file, or a zip archive that contains it. file, sha256: its name and hash.
    filtered: whether `file` is already filtered. sizes: the expected numbers of users, items and events.
    titles: a file in the same folder with lines `id::title::...`.
    """

    name: str
    url: str
    file: str
    sha256: str
    filtered: bool
    sizes: tuple[int, int, int]
    licence: str
    titles: str | None = None


ML_1M = NamedSet(
    name="ml-1m",
    url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    file="ratings.dat",
    sha256="506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f",
    filtered=False,
    sizes=(6_040, 3_416, 999_611),
    licence="MovieLens 1M, GroupLens, University of Minnesota: for research, not to be redistributed, no commercial use "
    "without permission; cite Harper and Konstan (2015), https://doi.org/10.1145/2827872",
    titles="movies.dat",
)
AMAZON_GAMES = NamedSet(
    name="amazon-games",
    url="https://raw.githubusercontent.com/kang205/SASRec/master/data/Video.txt",
    file="Video.txt",
    sha256="b7376fe24430743f411dc7f567285657b2adb3f74361cc7ba0aee94f3024b651",
    filtered=True,
    sizes=(31_013, 23_715, 287_107),
    licence="Amazon reviews (2014), Video Games, as filtered for SASRec by Kang and McAuley (2018): for research; cite "
    "McAuley et al. (2015), https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html",
)
NAMED = {named.name: named for named in (ML_1M, AMAZON_GAMES)}
DEMO = "demo"


def prepare_named(
    name: str, path: Path | str | None = None, *, on_stage: Callable[[str], None] = lambda stage: None
) -> Dataset:
    """Prepare a data set by its name.

    Args:
        name: "ml-1m", "amazon-games" or "demo".
        path: its file, or the folder that contains it. By default it comes from the cache, and is downloaded if needed.
        on_stage: called with the name of each step.

    Raises:
        DataError: there is no such data set or file, or the file is a different data set.
    """
    if name == DEMO:
        if path is not None:
            raise DataError(f"{DEMO} is made by the package itself; leave out --from")
        dataset = prepare(demo_frame(), catalogue=demo_items(), on_stage=on_stage)
        entry = {**dataset.manifest["catalogue"], "source": DEMO}
        return _marked(dataset, DEMO, "invented by the package; no real people", catalogue=entry)
    named = NAMED.get(name)
    if named is None:
        raise DataError(f"no data set is called {name!r}; there are: {', '.join([*NAMED, DEMO])}")
    return prepare_set(named, path, on_stage=on_stage)


def prepare_set(named: NamedSet, path: Path | str | None, *, on_stage: Callable[[str], None]) -> Dataset:
    """Prepare a set from `path` or the cache. A file with a different hash must give the expected sizes."""
    if path is None:
        on_stage(f"fetching {named.file}")
        file = fetch(named, cache_folder())
    else:
        file = Path(path).expanduser()
        file = file / named.file if file.is_dir() else file
        if not file.is_file():
            raise DataError(f"{file}: no such file; --from takes {named.file} of {named.name}, from {named.url}")
    filtered = named.filtered and sha256_of([file]) == named.sha256
    dataset = prepare(file, min_events=0 if filtered else MIN_EVENTS, on_stage=on_stage)
    if (titles := _titles(file, named)) is not None:
        dataset = replace(dataset, catalogue=make_catalogue(dataset.catalogue["item_id"], titles))
    sizes = (len(dataset.sequences), len(dataset.catalogue), len(dataset.sequences.items))
    if sizes != named.sizes:
        given, wanted = ("{:,} users, {:,} items and {:,} events".format(*counts) for counts in (sizes, named.sizes))
        raise DataError(
            f"{file}: gives {given} where {named.name} has {wanted}, so it is another data set; prepare it as a log of "
            f"your own: dpformer prepare {file} --min-events {MIN_EVENTS}"
        )
    outside = (
        f"{named.name} keeps users and items with at least {MIN_EVENTS} events; this counts over people, is part of "
        "the published data set, and its outcome is taken as public"
    )
    return _marked(dataset, named.name, named.licence, outside_guarantee=[outside])


def cache_folder() -> Path:
    """Return `$DPFORMER_CACHE`, or `dpformer` in the user's cache folder."""
    if given := os.environ.get("DPFORMER_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpformer"


def fetch(named: NamedSet, cache: Path) -> Path:
    """Return the set's file in the cache: download it if needed, and check its hash."""
    folder = cache / named.name
    file = folder / named.file
    if not file.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(named.url, timeout=60) as answer:
                downloaded = io.BytesIO(answer.read())
            if zipfile.is_zipfile(downloaded):
                with zipfile.ZipFile(downloaded) as archive:
                    # Paths inside the archive are ignored, so it cannot write elsewhere.
                    members = {Path(member).name: member for member in archive.namelist()}
                    files = {name: archive.read(members[name]) for name in (named.titles, named.file) if name}
            else:
                files = {named.file: downloaded.getvalue()}
            for name, content in files.items():
                write_file(folder / name, content)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            reason = getattr(error, "reason", error)
            wanted = named.file if named.titles is None else f"{named.file} (and {named.titles}, for the titles)"
            raise DataError(
                f"{named.name} cannot be downloaded from {named.url} ({reason}); get {wanted} elsewhere and "
                f"put it into {folder}, or give its path with --from PATH"
            ) from None
    if sha256_of([file]) != named.sha256:
        raise DataError(f"{file}: is not the file of {named.name} (sha256 differs); delete it and try again")
    return file


def _titles(file: Path, named: NamedSet) -> pl.DataFrame | None:
    """Read lines `id::title::...` in Latin-1, the encoding that GroupLens uses."""
    if named.titles is None or not (file.parent / named.titles).is_file():
        return None
    lines = (file.parent / named.titles).read_text(encoding="latin-1").splitlines()
    fields = [line.split("::") for line in lines if line.count("::") >= 1]
    return pl.DataFrame({"item_id": [row[0] for row in fields], "title": [row[1] for row in fields]})


def _marked(dataset: Dataset, name: str, licence: str, **entries: Any) -> Dataset:
    marks = {"dataset": {"name": name, "licence": licence}, **entries}
    return replace(dataset, manifest={**dataset.manifest, **marks})

"""Data sets by name: cache, download, `--from`, and what a wrong file is told."""

import gzip
import hashlib
import http.server
import io
import json
import threading
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpformer.data import demo_frame, held_out, prepare_named
from dpformer.data.named import ML_1M, NamedSet, fetch, prepare_set
from dpformer.errors import DataError

RATINGS = "".join(f"{user}::{item}::5::{978300000 + user * item}\n" for user in range(1, 7) for item in range(1, 7))
MOVIES = "1::Caf\xe9 (1990)::Drama\n2::Heat: Part 2 (1995)::Action|Crime\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A real web server on this machine, for the folder `site`."""
    (tmp_path / "site").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "site"))

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def small(url: str) -> NamedSet:
    digest = hashlib.sha256(RATINGS.encode()).hexdigest()
    return replace(ML_1M, url=url, sha256=digest, sizes=(6, 6, 36))


def archive() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as opened:
        opened.writestr("ml-1m/README", "read me")
        opened.writestr("ml-1m/ratings.dat", RATINGS)
        opened.writestr("ml-1m/movies.dat", MOVIES.encode("latin-1"))
        opened.writestr("../../escape.dat", "no")
    return out.getvalue()


def test_download_unpack_check_and_keep(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "site" / "ml-1m.zip").write_bytes(archive())
    monkeypatch.setenv("DPFORMER_CACHE", str(tmp_path / "cache"))
    named = small(f"{server}/ml-1m.zip")
    dataset = prepare_set(named, None, on_stage=lambda stage: None)
    assert dataset.names()[1:3] == ["Café (1990)", "Heat: Part 2 (1995)"]
    assert dataset.manifest["dataset"] == {"name": "ml-1m", "licence": ML_1M.licence}
    assert sorted(path.name for path in (tmp_path / "cache" / "ml-1m").iterdir()) == ["movies.dat", "ratings.dat"]
    # Once there, no network is needed.
    (tmp_path / "site" / "ml-1m.zip").unlink()
    assert fetch(named, tmp_path / "cache").read_text() == RATINGS


def test_a_download_of_something_else_is_refused(tmp_path: Path, server: str):
    (tmp_path / "site" / "ratings.dat").write_text("1::2::3::4\n")
    with pytest.raises(DataError, match="sha256 differs"):
        fetch(small(f"{server}/ratings.dat"), tmp_path / "cache")


@pytest.mark.parametrize("name", ["missing.zip", "wrong.zip"])
def test_a_failed_download_says_where_to_put_which_file(name: str, tmp_path: Path, server: str):
    with zipfile.ZipFile(tmp_path / "site" / "wrong.zip", "w") as opened:
        opened.writestr("other.dat", "x")
    with pytest.raises(DataError) as caught:
        fetch(small(f"{server}/{name}"), tmp_path / "cache")
    for part in (server, "ratings.dat (and movies.dat", str(tmp_path / "cache" / "ml-1m"), "--from PATH"):
        assert part in str(caught.value)
    assert not list((tmp_path / "cache" / "ml-1m").iterdir())


def test_without_network(tmp_path: Path):
    # Port 9 of this machine: nobody listens.
    with pytest.raises(DataError) as caught:
        fetch(small("http://127.0.0.1:9/ml-1m.zip"), tmp_path / "cache")
    assert "refused" in str(caught.value)
    assert str(tmp_path / "cache" / "ml-1m") in str(caught.value)


def test_from_another_file_is_refused_with_a_cure(tmp_path: Path, dpformer: Callable):
    (tmp_path / "ratings.dat").write_text(RATINGS)
    done = dpformer("prepare", "ml-1m", "--from", tmp_path / "ratings.dat", "-o", tmp_path / "out")
    assert done.code == 2
    assert (
        "gives 6 users, 6 items and 36 events where ml-1m has 6,040 users, 3,416 items and 999,611 events" in done.err
    )
    assert f"dpformer prepare {tmp_path / 'ratings.dat'} --min-events 5" in done.err
    assert not (tmp_path / "out").exists()
    done = dpformer("prepare", "ml-1m", "--from", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert done.code == 2
    assert "no such file" in done.err


def test_named_sets_keep_their_filters(tmp_path: Path, dpformer: Callable):
    done = dpformer("prepare", "ml-1m", "--min-events", 3, "-o", tmp_path / "out")
    assert done.code == 2
    assert "its own columns and filter" in done.err
    with pytest.raises(DataError, match="ml-1m, amazon-games, demo"):
        prepare_named("ml-2m")


def test_ml_1m_on_the_command_line(ml_1m: Path, tmp_path: Path, dpformer: Callable):
    done = dpformer("prepare", "ml-1m", "--from", ml_1m.parent, "-o", tmp_path / "out", "--json")
    figures = json.loads(done.out)
    assert (figures["users"], figures["items"], figures["events"]) == (6_040, 3_416, 999_611)
    assert figures["manifest"]["input"]["sha256"] == ML_1M.sha256
    assert figures["manifest"]["counts"]["removed"] == {"users": 0, "items": 290, "events": 598}


def test_amazon_games_from_raw_reviews(video_txt: Path, tmp_path: Path):
    """The raw file is large and not ours to ship; one that filters down to `Video.txt` is built around it.

    Users and items with fewer than five events there had more in the raw reviews: give them events with items and
    users that occur once, which the single pass removes again.
    """
    pairs = [line.split() for line in video_txt.read_text().splitlines()]
    users, items = Counter(user for user, _ in pairs), Counter(item for _, item in pairs)
    raw = [(f"A{user}", f"B{item}") for user, item in pairs]
    raw += [(f"A{user}", f"rare-{user}-{n}") for user, count in users.items() for n in range(5 - count)]
    raw += [(f"rare-{item}-{n}", f"B{item}") for item, count in items.items() for n in range(5 - count)]
    reviews = "".join(
        f'{{"reviewerID": "{user}", "asin": "{item}", "overall": 5.0, "unixReviewTime": {1_000_000_000 + time}}}\n'
        for time, (user, item) in enumerate(raw)
    )
    path = tmp_path / "reviews_Video_Games.json.gz"
    path.write_bytes(gzip.compress(reviews.encode(), 1))
    dataset = prepare_named("amazon-games", path)
    assert dataset.manifest["options"] == {
        "min_events": 5,
        "filter": "single-pass",
        "min_user_events": 0,
        "dedupe": False,
    }
    expected: dict[str, list[str]] = defaultdict(list)
    for user, item in pairs:
        expected[f"A{user}"].append(f"B{item}")
    names = np.array(dataset.names())
    rows = zip(dataset.sequences.users, dataset.sequences, strict=True)
    assert {user: names[row].tolist() for user, row in rows} == expected


def test_the_demo_data_is_the_same_everywhere():
    frame = demo_frame()
    assert frame.equals(demo_frame())
    digest = hashlib.sha256(frame.write_csv().encode()).hexdigest()
    assert digest == "e0e9c78a010efa798a5066751aad6910d72a50d44d6eaa7296cac2ba7a4cb99a"


def test_the_demo_data_has_a_long_tail_and_sequences_to_learn():
    dataset = prepare_named("demo")
    assert len(dataset.sequences) == 3000
    assert len(dataset.catalogue) == 500
    assert "The Harbour Mysteries, vol. 1" in dataset.names()
    held = held_out(dataset.sequences, "validation")
    train = held.histories
    counts = np.bincount(train.items, minlength=501)
    assert np.sort(counts)[-50:].sum() > 0.5 * counts.sum()
    # Popularity against "what most often followed the item before", both ten guesses, on the held-out item.
    owners = np.repeat(np.arange(len(train)), train.lengths)
    same = owners[1:] == owners[:-1]
    pairs = pl.DataFrame({"a": train.items[:-1][same], "b": train.items[1:][same]})
    follow = np.zeros((501, 501))
    np.add.at(follow, (pairs["a"].to_numpy(), pairs["b"].to_numpy()), 1)
    popular = np.isin(held.targets, np.argsort(-counts)[:10]).mean()
    last = np.array([sequence[-1] for sequence in train])[held.evaluated]
    guesses = np.argsort(-follow[last], axis=1)[:, :10]
    sequential = (guesses == held.targets[:, None]).any(axis=1).mean()
    assert popular == pytest.approx(0.285, abs=0.005)
    assert sequential == pytest.approx(0.649, abs=0.005)

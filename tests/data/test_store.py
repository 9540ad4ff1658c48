"""The prepared folder: whole or not at all, and checked when it is read."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Dataset, Sequences, collate, held_out, load, prepare, save, store
from dpformer.data.batches import cut
from dpformer.data.read.ids import NULLS
from dpformer.errors import DataError

LOG = pl.DataFrame({"user": ["a", "a", "a", "b"], "item": [3, 1, 2, 1], "title": ["C", "A", "B", "A"]})


@settings(max_examples=10, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"])).filter(
                lambda text: text.strip() and text.strip().lower() not in NULLS
            ),
            st.integers(),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_loading_what_was_saved(events: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory):
    rows = [(user, item % 2**63) for user, item in [*events, events[0]]]
    dataset = prepare(pl.DataFrame(rows, schema=["user", "item"], orient="row"), null_values=())
    folder = tmp_path_factory.mktemp("store") / "out"
    save(dataset, folder)
    again = load(folder)
    assert np.array_equal(again.sequences.items, dataset.sequences.items)
    assert np.array_equal(again.sequences.offsets, dataset.sequences.offsets)
    assert again.sequences.items.dtype == np.int32
    assert again.sequences.users.equals(dataset.sequences.users)
    assert again.catalogue.equals(dataset.catalogue)
    assert again.manifest == dataset.manifest


def test_users_without_events_keep_their_places(tmp_path: Path):
    whole = prepare(LOG)
    for offsets, items in (([0, 0, 3, 3], [3, 1, 2]), ([0, 0, 0, 0], [])):
        users = pl.Series("user_id", ["a", "b", "c"])
        sequences = Sequences(users, np.array(items, dtype=np.int32), np.array(offsets))
        assert [len(row) for row in sequences.frame()["items"]] == np.diff(offsets).tolist()
        again = Sequences.from_frame(sequences.frame())
        assert np.array_equal(again.offsets, sequences.offsets)
        assert np.array_equal(again.items, sequences.items)
        if items:
            save(Dataset(sequences, whole.catalogue, whole.manifest), tmp_path / "out")
            assert np.array_equal(load(tmp_path / "out").sequences.offsets, offsets)
            assert held_out(sequences).evaluated.tolist() == [1]
            assert sum(len(part) for part in cut(np.arange(3), sequences.lengths, 10)) == 3
            assert collate(sequences, np.array([0, 2]), 5).tokens.shape == (2, 0)


def test_a_user_who_is_in_a_folder_twice_is_refused(tmp_path: Path):
    """That user would be drawn and clipped twice, under a guarantee for one."""
    whole = prepare(LOG)
    frame = whole.sequences.frame()
    twice = Sequences.from_frame(pl.concat([frame, frame[:1]]))
    save(Dataset(twice, whole.catalogue, whole.manifest), tmp_path / "out")
    with pytest.raises(DataError, match="1 users are in it more than once; run dpformer prepare again"):
        load(tmp_path / "out")


def test_what_a_folder_holds(tmp_path: Path):
    save(prepare(LOG, title="title"), tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(
        ["sequences.parquet", "items.parquet", "manifest.json", "long-tail.svg"]
    )
    assert (tmp_path / "out" / "long-tail.svg").read_text().startswith("<svg")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {"format", "version", "input", "options", "counts", "notes", "files"} <= set(manifest)
    # The catalogue goes out with a model: items only.
    assert pl.read_parquet(tmp_path / "out" / "items.parquet").columns == ["item", "item_id", "title"]


def test_nothing_is_written_over(tmp_path: Path):
    dataset = prepare(LOG)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(DataError, match="not written by prepare"):
            save(dataset, tmp_path / "mine", force=force)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="not written by prepare"):
        save(dataset, tmp_path / "file", force=True)
    save(dataset, tmp_path / "out")
    with pytest.raises(DataError, match="force=True"):
        save(dataset, tmp_path / "out")
    save(prepare(LOG.head(2)), tmp_path / "out", force=True)
    assert len(load(tmp_path / "out").sequences) == 1
    (tmp_path / "empty").mkdir()
    save(dataset, tmp_path / "empty")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_a_failure_half_way_leaves_nothing_new_and_the_old_as_it_was(tmp_path: Path):
    dataset = prepare(LOG)
    save(dataset, tmp_path / "out")
    broken = Dataset(dataset.sequences, dataset.catalogue, {**dataset.manifest, "cannot": object()})
    for folder in ("out", "new"):
        with pytest.raises(TypeError):
            save(broken, tmp_path / folder, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(load(tmp_path / "out").sequences) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot be written"):
        save(prepare(LOG), tmp_path / "file" / "out")


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_disk_that_fails_while_parquet_is_written_is_told_in_one_line(tmp_path: Path):
    """No file may grow beyond 2,000 bytes, as with a quota: polars has an error of its own for that, which is no OSError."""
    program = f"""
import resource, signal
from dpformer.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
import sys
sys.argv = ["dpformer", "prepare", "demo", "-o", {str(tmp_path / "out")!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr
    assert "too large" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_changed_folder_is_refused(tmp_path: Path):
    folder = tmp_path / "out"
    save(prepare(LOG), folder)
    content = (folder / store.SEQUENCES).read_bytes()
    (folder / store.SEQUENCES).write_bytes(content[:-1] + b"x")
    with pytest.raises(DataError, match=r"sequences\.parquet: is not what the manifest says"):
        load(folder)
    (folder / store.SEQUENCES).unlink()
    with pytest.raises(DataError, match=r"sequences\.parquet: is missing"):
        load(folder)
    manifest = json.loads((folder / store.MANIFEST).read_text())
    (folder / store.MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(DataError, match="version 99"):
        load(folder)
    (folder / store.MANIFEST).write_text("{")
    with pytest.raises(DataError, match="no prepared data"):
        load(folder)


def test_an_interrupt_while_polars_reads_is_an_interrupt_and_no_damaged_file(tmp_path):
    """polars asks Python for options of its first scan; Ctrl-C in that moment makes it panic."""
    save(prepare(LOG, user="user", item="item"), tmp_path / "data")
    program = (
        "import sys\n"
        "from polars.io.scan_options.cast_options import ScanCastOptions\n"
        "from dpformer.data import load\n"
        "def interrupted(*_): raise KeyboardInterrupt\n"
        "ScanCastOptions._default = interrupted\n"
        "try: load(sys.argv[1])\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "data"], capture_output=True, text=True)
    assert done.stdout == "interrupted\n", done.stderr[-500:]

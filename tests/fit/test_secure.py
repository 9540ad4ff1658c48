"""Secure defaults: who may read what, and nobody's id in anything that is released, logged or printed."""

import gzip
import io
import os
from pathlib import Path

import polars as pl
import pytest

from dpformer.data import prepare, save
from dpformer.errors import DPFormerError, PrivacyError
from dpformer.fit.run import resume, start
from dpformer.fit.workers import Worker
from dpformer.privacy import read_ledger
from tests.fit.conftest import plant_worker, small_log
from tests.recipes import small_recipe

MARK = "x7Qz"  # in every user id of `small_log`
BUDGET = ["--epsilon", "20", "--delta", "0.001"]
SMALL = [*("--preset", "pure"), *BUDGET, *("--set", "d=8", "--set", "max_length=6", "--set", "epochs=2")]
KINDS = {
    "transformer": SMALL,
    "gru": [*SMALL, "--model", "gru", "--set", "recency=none"],
    "distilled": ["--preset", "distilled", *BUDGET, "--set", "d=8", "--set", "steps=2"],
    "default": [*SMALL, "--preset", "default"],
    "transitions": ["--preset", "transitions", *BUDGET],
    "popularity": ["--preset", "popularity", *BUDGET],
}


def everything(path: Path) -> bytes:
    """A file's bytes; of Parquet also every cell, unpacked."""
    content = path.read_bytes()
    if path.suffix == ".parquet":
        out = io.BytesIO()
        frame = pl.read_parquet(path)
        frame.write_parquet(out, compression="uncompressed", use_pyarrow=False)
        content += out.getvalue() + repr(frame.to_dict(as_series=False)).encode()
    return content


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_in_what_is_released_or_printed(kind, tmp_path, data, dpformer):
    assert MARK.encode() in everything(data / "sequences.parquet")  # so the search would find it
    run = tmp_path / "run"
    said = [dpformer("fit", data, "--run", run, *KINDS[kind])]
    said += [dpformer("evaluate", run), dpformer("show", run, "--json"), dpformer("recommend", run, "--history", "i03")]
    for done in said:
        assert done.code == 0, done.err
        assert MARK not in done.out + done.err
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) >= 10
    for path in files:
        assert MARK.encode() not in everything(path), path
        assert str(data).encode() not in everything(path) or path.name == "local.json", path


def test_ids_that_are_numbers_are_not_in_a_model(tmp_path, dpformer):
    """Eight bytes that no other number has, in both orders, as text and in hexadecimal."""
    numbers = {
        user: 0x5A17C3E94B26D800 + n for n, user in enumerate(small_log()["user_id"].unique(maintain_order=True))
    }
    save(prepare(small_log().with_columns(user_id=pl.col("user_id").replace_strict(numbers))), tmp_path / "data")
    assert dpformer("fit", tmp_path / "data", "--run", tmp_path / "run", *SMALL).code == 0
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            content = everything(path)
            for number in numbers.values():
                forms = (number.to_bytes(8, "little"), number.to_bytes(8, "big"), str(number).encode(), b"%x" % number)
                assert not any(form in content for form in forms), path


def test_the_search_finds_a_planted_user(tmp_path):
    pl.DataFrame({"item_id": ["a", f"person-{MARK}"] * 500}).write_parquet(tmp_path / "items.parquet")
    assert MARK.encode() in everything(tmp_path / "items.parquet")
    assert MARK.encode() not in gzip.compress(f"person-{MARK}".encode() * 9)  # packed, it would not be seen


def test_who_may_read_what(tmp_path, dpformer):
    """Under the most generous mask: what carries no noise is for its owner only."""
    before = os.umask(0)
    try:
        small_log().write_csv(tmp_path / "log.csv")
        assert dpformer("prepare", tmp_path / "log.csv", "-o", tmp_path / "data").code == 0
        assert dpformer("fit", tmp_path / "data", "--run", tmp_path / "run", *SMALL).code == 0
        assert dpformer("evaluate", tmp_path / "run").code == 0
        assert dpformer("report", tmp_path / "run", "-o", tmp_path / "report.html").code == 0
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"local.json", "events.jsonl", "metrics.json"}
    assert not [name for name, mode in modes.items() if mode & 0o022], "writable by others"
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600
    assert b"not private" in (tmp_path / "report.html").read_bytes()


def test_a_run_without_privacy_is_locked_too(tmp_path, data):
    run = start(tmp_path / "run", data, small_recipe(epsilon=float("inf")))
    with pytest.raises(PrivacyError, match="in use by another process"):
        resume(tmp_path / "run")
    with pytest.raises(DPFormerError, match="exists already"):
        start(tmp_path / "run", data, small_recipe(epsilon=float("inf")))
    run.close()
    assert resume(tmp_path / "run").train()


@pytest.mark.parametrize(
    "trouble", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")]
)
def test_out_of_memory_in_a_micro_batch_spends_nothing(trouble, tmp_path, data):
    run = start(tmp_path / "run", data, small_recipe())

    class Short(Worker):
        def add(self, batch, masks=None):
            if run.step == 3:
                raise trouble
            return super().add(batch, masks)

    plant_worker(run, Short)
    with pytest.raises(DPFormerError, match=r"out of memory.*dpformer resume .*smaller network: --set network"):
        run.train()
    run.close()
    assert read_ledger(tmp_path / "run").steps_charged == 3
    assert resume(tmp_path / "run").train()
    assert read_ledger(tmp_path / "run").steps_charged == 10


def test_another_error_is_not_taken_for_a_shortage(tmp_path, data):
    class Broken(Worker):
        def add(self, batch, masks=None):
            return 1 / 0

    run = start(tmp_path / "run", data, small_recipe())
    plant_worker(run, Broken)
    with pytest.raises(ZeroDivisionError):
        run.train()
    run.close()

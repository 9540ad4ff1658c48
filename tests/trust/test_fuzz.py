"""Bad input gets a result or an error of one line; a few examples of what `scripts/fuzz.py` tries by the thousand."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from dpformer.data import load
from dpformer.errors import DataError, DPFormerError, PrivacyError
from dpformer.privacy import read_ledger


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fuzz():
    module = _script("fuzz")
    module.found = module.targets()
    yield module
    shutil.rmtree(module.WORK)


def test_every_target_survives(fuzz):
    assert len(fuzz.found) == 15
    for name, (target, strategy, _) in fuzz.found.items():
        tally = fuzz.Tally(target)
        assert fuzz.by_hypothesis(tally, strategy, 30, 0) is None, name
        assert tally.tried >= 30


def test_valid_inputs_are_read(fuzz):
    """Otherwise a reader that refuses everything would pass."""
    for name, (target, _, valid) in fuzz.found.items():
        for content in valid:
            try:
                target(content)
            except DPFormerError as error:
                pytest.fail(f"{name}: {error}")


def test_a_crash_is_found(fuzz):
    def broken(data: bytes) -> None:
        if len(data) > 3:
            raise KeyError("planted")

    problem = fuzz.by_hypothesis(fuzz.Tally(broken), fuzz.mutated([b"valid"]), 30, 0)
    assert problem is not None
    assert "planted" in problem


# Found by fuzzing, and mended.


@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.head"])
def test_a_ledger_of_deep_json(fuzz, name, tmp_path):
    folder = shutil.copytree(fuzz.released(), tmp_path / "run")
    (folder / name).write_bytes(b"[" * 5000 + b"\n")
    with pytest.raises(PrivacyError, match="do not trust it"):
        read_ledger(folder)


@pytest.mark.parametrize("content", [b"[" * 5000, b'{"format": "dpformer-sequences", "version": 1, "files": 7}', b"[]"])
def test_a_strange_manifest(fuzz, content):
    with pytest.raises(DataError, match=r"prepare"):
        fuzz.read_prepared("manifest.json", content)


@pytest.mark.parametrize("items", [[[1], [99]], [[1], None], [[0], [1]]])
def test_prepared_sequences_outside_the_catalogue(fuzz, items):
    import io

    import polars as pl

    out = io.BytesIO()
    frame = pl.DataFrame({"user_id": ["a", "b"], "items": pl.Series(items, dtype=pl.List(pl.Int32))})
    frame.write_parquet(out)
    with pytest.raises(DataError, match="was not written by dpformer prepare"):
        fuzz.read_prepared("sequences.parquet", out.getvalue())
    fuzz.released()
    assert len(load(fuzz.WORK / "data").sequences)


def test_a_config_that_is_json_but_not_ours(fuzz):
    for content in (b"7", json.dumps({"format": "dpformer-run", "version": 2, "recipe": 3}).encode(), b"{" * 3000):
        with pytest.raises(DPFormerError, match=r"config\.json|run folder"):
            fuzz.read_released("config.json", content)


def test_a_config_file_of_deep_tables(fuzz):
    with pytest.raises(DPFormerError, match="is not TOML"):
        fuzz.read_config(b"a = " + b"[" * 5000)


@pytest.mark.parametrize("stages", ["3", "[1]", '"ab"', "[{}]", '[{stage = "x"}]', "[{stage = [1]}]"])
def test_a_config_file_of_odd_stages(fuzz, stages):
    with pytest.raises(DPFormerError, match="stages must be a list"):
        fuzz.read_config(f"stages = {stages}\nd = 8\n".encode())


def test_a_bare_carriage_return(fuzz):
    """Refused or read, but no exception of the csv module."""
    tally = fuzz.Tally(fuzz.read_log)
    tally(b"user_id,item_id\ra,b\nc,d\n")
    tally(b"a,b\rc\n\rd,e\n")
    assert tally.tried == 2

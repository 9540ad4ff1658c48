"""A released folder may come from a stranger: no code of it runs, and it cannot ask for more memory than it has bytes."""

import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

from dpformer import load_model
from dpformer.artifact.read import SOME, column_hashes, read_catalogue
from dpformer.artifact.write import pack_catalogue
from dpformer.errors import DPFormerError
from dpformer.files import sha256
from dpformer.fit.run import start
from tests.fit.conftest import ITEMS
from tests.recipes import small_recipe

HASHED = ("config.json", "model.json", "items.jsonl", "privacy.json", "model.safetensors")


@pytest.fixture(scope="module")
def honest(tmp_path_factory, data) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "run"
    assert start(folder, data, small_recipe(epochs=1.0)).train()
    return folder


@pytest.fixture
def strange(honest, tmp_path) -> Path:
    return shutil.copytree(honest, tmp_path / "strange")


def put(folder: Path, name: str, content: bytes) -> None:
    """Replace a file, and make the hashes fit, as a stranger would."""
    (folder / name).write_bytes(content)
    known = json.loads((folder / "files.json").read_text())
    known |= {n: sha256(folder / n) for n in HASHED if n != "items.jsonl"}
    if name == "items.jsonl":
        known[name] = {"item_id": _ids(folder / name)}
    (folder / "files.json").write_text(json.dumps(known))


def _ids(path: Path) -> str:
    try:
        return column_hashes(pl.read_ndjson(path))["item_id"]
    except (KeyError, pl.exceptions.PolarsError):
        return ""


def refused(folder: Path, match: str) -> None:
    """The folder is refused with one line, and memory stays where it was."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DPFormerError, match=match) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes


@pytest.mark.parametrize("name", [name for name in HASHED if name != "items.jsonl"])
def test_a_file_that_was_changed_is_refused(strange, name):
    """A statement with another epsilon, another model, other settings: without the hash of the new file."""
    (strange / name).write_bytes((strange / name).read_bytes().replace(b"1", b"2", 1) + b" ")
    refused(strange, "sha256 differs")


def test_the_honest_folder_loads(honest):
    assert len(load_model(honest).recommend([["i03"]], k=3)) == 3


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"d": 10**9}, "model.json"),
        ({"blocks": 10**9}, "model.json"),
        ({"max_length": 10**12}, "model.json"),
        ({"d": 2**14, "feed_forward": 2**16, "blocks": 256}, "missing or too many"),
        ({"max_length": 10**6, "d": 2**14}, "asks for"),
        ({"max_length": 10**6, "recency": 1.0}, "missing or too many"),
        ({"items": 10**12}, "asks for"),
        ({"vocabulary": 10**15}, "missing or too many"),
        ({"kind": "gru"}, "model.json"),
        ({"kind": "nothing"}, "no model of kind"),
        ({"kind": ["transformer"]}, "no model of kind"),
        ({"more": 1}, "model.json"),
    ],
)
def test_a_spec_that_asks_for_too_much(settings, match, strange):
    spec = json.loads((strange / "model.json").read_text())
    put(strange, "model.json", json.dumps(spec | settings).encode())
    refused(strange, match)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "gru", "items": ITEMS, "d": 2**14},
        {"kind": "popularity", "items": ITEMS},
        {"kind": "transitions", "items": ITEMS, "head": 10**9},
        {"kind": "ensemble", "items": ITEMS, "network": {"kind": "gru", "items": ITEMS}},
        [],
        "transformer",
    ],
)
def test_a_spec_of_another_model(spec, strange):
    put(strange, "model.json", json.dumps(spec).encode())
    refused(strange, "model.json")


def items_of(folder: Path) -> pl.DataFrame:
    return pl.read_ndjson(folder / "items.jsonl")


def test_a_catalogue_with_more_items_than_the_model(strange):
    spec = json.loads((strange / "model.json").read_text())
    put(strange, "model.json", json.dumps({**spec, "items": 10**12}).encode())
    refused(strange, "does not fit")


def test_a_catalogue_with_more_or_fewer_items_than_the_config(strange):
    lines = (strange / "items.jsonl").read_bytes().splitlines(keepends=True)
    put(strange, "items.jsonl", b"".join(lines[:-1]))
    refused(strange, f"has {ITEMS - 1} items and does not fit model.json, which has {ITEMS}")
    put(strange, "items.jsonl", b"".join(lines) + lines[-1].replace(b'"item":20', b'"item":21'))
    refused(strange, f"has {ITEMS + 1} items and does not fit")


def test_a_catalogue_that_is_too_large_is_not_read(strange):
    frame = items_of(strange).with_columns(title=pl.lit("a" * 100_000) + pl.col("item_id"))
    put(strange, "items.jsonl", pack_catalogue(frame))
    refused(strange, r"has 2,\d+,\d+ bytes for 20 items; no catalogue does")
    with open(strange / "items.jsonl", "wb") as file:
        file.truncate(1 << 40)  # a hole; it has no blocks
    refused(strange, "no catalogue does")
    (strange / "items.jsonl").write_bytes(b" " * (SOME + 2))
    refused(strange, "line 1 is longer than")


def test_a_catalogue_of_many_fields_in_one_line(strange):
    """A table of them would have a cell for each field in each line."""
    lines = (strange / "items.jsonl").read_bytes().splitlines(keepends=True)
    many = {**json.loads(lines[0]), **{f"x{n}": 1 for n in range(10_000)}}
    put(strange, "items.jsonl", b"".join([json.dumps(many).encode() + b"\n", *lines[1:]]))
    refused(strange, "line 2 is not an item with the next number and the fields of the first line")


def test_columns_may_be_added_to_a_catalogue(strange):
    rows = items_of(strange).to_dicts()
    prices = [1, 2.5, None] + [3] * (ITEMS - 3)
    for row, price in zip(rows, prices, strict=True):
        row |= {"year": 1990 + row["item"], "genres": [row["title"]], "price": price}
    (strange / "items.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = load_model(strange).catalogue
    assert found["genres"].to_list() == [row["genres"] for row in rows]
    assert found["price"].to_list() == prices
    assert found.schema["year"] == pl.Int64


@pytest.mark.parametrize("ids", [[3, -1, 2**40], ["3", "\n", '"é ']], ids=["numbers", "text"])
@pytest.mark.parametrize("title", [["a", None, "b"], [None, None, None], None], ids=["some", "empty", "none"])
def test_a_catalogue_is_read_as_it_was_written(ids, title, tmp_path):
    columns = {"item": pl.Series([1, 2, 3], dtype=pl.Int32), "item_id": ids}
    frame = pl.DataFrame(columns if title is None else {**columns, "title": title})
    (tmp_path / "items.jsonl").write_bytes(pack_catalogue(frame))
    found = read_catalogue(tmp_path / "items.jsonl", 3)
    assert found.equals(frame)
    assert found.schema["item_id"] == frame.schema["item_id"]
    assert found.schema["item"] == pl.Int32


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.with_columns(item=pl.col("item") + 1),
        lambda f: f.with_columns(item=pl.col("item").cast(pl.String)),
        lambda f: f.with_columns(title=pl.concat_list("title", "title")),
        lambda f: f.drop("item_id"),
        lambda f: f.clear(),
        lambda f: f.with_columns(item_id=pl.lit(None, dtype=pl.String)),
        lambda f: f.with_columns(item_id=pl.lit(1.5)),
        lambda f: f.with_columns(more=pl.struct("title")),
        lambda f: f.with_columns(more=pl.concat_list(pl.struct("title"))),
    ],
)
def test_a_catalogue_that_is_none(change, strange):
    put(strange, "items.jsonl", pack_catalogue(change(items_of(strange))))
    refused(strange, "items.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b'{"item": true, "item_id": "a", "title": "b"}'),
        *(b'{"item": 1, "item_id": 7, "title": "b"}', b'{"item": 1, "item_id": "a", "title": NaN}'),
        *(b'{"item": 1, "item_id": "\\ud800", "title": "b"}', b'{"item": 1, "item_id": "a", "title": [[1]]}'),
        *(b'{"item": 1, "item_id": "a", "title": 7}', b'{"item": 1, "item_id": "a"}', b'{"item": 1.0}'),
    ],
)
def test_a_line_that_is_no_item(line, strange):
    lines = (strange / "items.jsonl").read_bytes().splitlines(keepends=True)
    put(strange, "items.jsonl", b"".join([line + b"\n", *lines[1:]]))
    refused(strange, "items.jsonl")


def header(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header({"embedding.weight": {"dtype": "F32", "shape": [2**40, 8], "data_offsets": [0, 2**45]}}),
        header({"embedding.weight": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}}),
        (2**60).to_bytes(8, "little") + b"{}",
        b"PK\x03\x04",
    ],
)
def test_a_model_of_claims(content, strange):
    put(strange, "model.safetensors", content)
    refused(strange, "does not fit model.json or is damaged")


@pytest.mark.parametrize("name", ["embedding.weight", "frequencies", "norm.weight"])
@pytest.mark.parametrize("what", ["nan", "float64", "shape", "missing"])
def test_a_model_of_other_tensors(name, what, strange):
    tensors = load_file(strange / "model.safetensors")
    if what == "nan":
        tensors[name].view(-1)[-1] = torch.nan
    elif what == "float64":
        tensors[name] = tensors[name].double()
    elif what == "shape":
        tensors[name] = torch.zeros(2, 3)
    else:
        del tensors[name]
    put(strange, "model.safetensors", to_safetensors(tensors))
    refused(strange, "does not fit model.json or is damaged")


def test_nothing_runs(strange, tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    for name in HASHED:
        folder = shutil.copytree(strange, tmp_path / f"trap-{name}")
        put(folder, name, pickle.dumps(Trap()))
        with pytest.raises(DPFormerError):
            load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_no_waiting_for_a_pipe_and_no_endless_json(strange):
    (strange / "config.json").unlink()
    os.mkfifo(strange / "config.json")
    refused(strange, "no plain file")
    (strange / "config.json").unlink()
    with open(strange / "config.json", "wb") as file:
        file.truncate(1 << 40)  # a hole; it has no blocks
    refused(strange, "far more than dpformer writes")


def test_transitions_of_a_stranger(tmp_path, data):
    folder = tmp_path / "run"
    assert start(folder, data, small_recipe("transitions")).train()
    tensors = load_file(folder / "model.safetensors")
    for name, value in {
        "head": tensors["head"] + ITEMS,
        "matrix": torch.zeros(2, 2),
        "tail": torch.zeros(5),
        "prior": torch.zeros(1),
    }.items():
        put(folder, "model.safetensors", to_safetensors({**tensors, name: value}))
        refused(folder, "does not fit model.json or is damaged")


def test_a_vocabulary_of_a_stranger(tmp_path, data):
    folder = tmp_path / "run"
    assert start(folder, data, small_recipe(epochs=1.0, vocabulary=5)).train()
    tensors = load_file(folder / "model.safetensors")
    for chosen in (tensors["chosen"] + ITEMS, tensors["chosen"] - 2, torch.zeros_like(tensors["chosen"])):
        put(folder, "model.safetensors", to_safetensors({**tensors, "chosen": chosen}))
        refused(folder, "does not fit model.json or is damaged")

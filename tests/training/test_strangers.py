"""A released folder may come from a stranger: no code of it runs, and it cannot ask for more memory than it has bytes."""

import io
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

from dpformer.errors import DPFormerError
from dpformer.training.files import sha256
from dpformer.training.pages import PageError, unpacked
from dpformer.training.released import load_model
from dpformer.training.run import start
from dpformer.training.session import begin
from dpformer.training.sizes import column_hashes
from tests.training.conftest import ITEMS, small_recipe

HASHED = ("config.json", "items.parquet", "privacy.json", "model.safetensors")


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
    known |= {n: sha256(folder / n) for n in HASHED if n != "items.parquet"}
    if name == "items.parquet":
        known[name] = {"item_id": _ids(folder / name)}
    (folder / "files.json").write_text(json.dumps(known))


def _ids(path: Path) -> str:
    try:
        return column_hashes(pl.read_parquet(path))["item_id"]
    except (KeyError, pl.exceptions.PolarsError):
        return ""


def parquet(frame: pl.DataFrame) -> bytes:
    out = io.BytesIO()
    frame.write_parquet(out)
    return out.getvalue()


def refused(folder: Path, match: str) -> None:
    """The folder is refused with one line, and memory stays where it was."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DPFormerError, match=match) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes


def test_the_honest_folder_loads(honest):
    assert len(load_model(honest).recommend([["i03"]], k=3)) == 3


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"d": 10**9}, "config.json"),
        ({"blocks": 10**9}, "config.json"),
        ({"max_length": 10**12}, "config.json"),
        ({"d": 2**14, "feed_forward": 2**16, "blocks": 256}, "ask for 8"),
        ({"max_length": 10**6, "d": 2**14}, "ask for 1"),
        ({"model": "gru", "d": 2**14}, "ask for"),
        ({"model": "popularity"}, "does not fit"),
    ],
)
def test_a_recipe_that_asks_for_too_much(settings, match, strange):
    config = json.loads((strange / "config.json").read_text())
    config["recipe"] |= settings
    put(strange, "config.json", json.dumps(config).encode())
    refused(strange, match)


def test_a_catalogue_of_many_equal_rows(strange):
    rows = 3_000_000  # 24 MB, in a few hundred kilobytes
    frame = pl.DataFrame(
        {"item": pl.int_range(1, rows + 1, dtype=pl.Int32, eager=True), "item_id": pl.repeat("x", rows, eager=True)}
    )
    put(strange, "items.parquet", parquet(frame))
    refused(strange, "does not fit")


def test_a_catalogue_of_few_enormous_rows(strange):
    frame = pl.read_parquet(strange / "items.parquet").with_columns(title=pl.lit("a" * 2_000_000) + pl.col("item_id"))
    content = parquet(frame)
    assert len(content) < 200_000
    put(strange, "items.parquet", content)
    refused(strange, "unpacks to 4")


def test_a_catalogue_with_one_endless_list(strange):
    many = pl.Series([[7] * 2_000_000] + [[7]] * (ITEMS - 1))
    content = parquet(pl.read_parquet(strange / "items.parquet").with_columns(genres=many))
    assert len(content) < 50_000
    put(strange, "items.parquet", content)
    refused(strange, "unpacks to 48")


def test_columns_may_be_added_to_a_catalogue(strange):
    frame = pl.read_parquet(strange / "items.parquet").with_columns(
        year=1990 + pl.col("item"), genres=pl.concat_list("title")
    )
    (strange / "items.parquet").write_bytes(parquet(frame))
    assert "genres" in load_model(strange).catalogue.columns


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.with_columns(item=pl.col("item") + 1),
        lambda f: f.with_columns(item=pl.col("item").cast(pl.String)),
        lambda f: f.with_columns(title=pl.concat_list("title", "title")),
        lambda f: f.drop("item_id"),
        lambda f: f.clear(),
        lambda f: f.with_columns(item_id=pl.lit(None, dtype=pl.String)),
    ],
)
def test_a_catalogue_that_is_none(change, strange):
    put(strange, "items.parquet", parquet(change(pl.read_parquet(strange / "items.parquet"))))
    refused(strange, "items.parquet")


def header(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header({"model.embedding.weight": {"dtype": "F32", "shape": [2**40, 8], "data_offsets": [0, 2**45]}}),
        header({"model.embedding.weight": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}}),
        (2**60).to_bytes(8, "little") + b"{}",
        b"PK\x03\x04",
    ],
)
def test_a_model_of_claims(content, strange):
    put(strange, "model.safetensors", content)
    refused(strange, "does not fit config.json or is damaged")


@pytest.mark.parametrize("name", ["model.embedding.weight", "popularity", "model.norm.weight"])
@pytest.mark.parametrize("what", ["nan", "float64", "shape", "missing"])
def test_a_model_of_other_tensors(name, what, strange):
    tensors = load_file(strange / "model.safetensors")
    if what == "nan":
        tensors[name].view(-1)[-1] = torch.nan
    elif what == "float64":
        tensors[name] = tensors[name].double()
    elif what == "shape":
        tensors[name] = torch.zeros(2, 3)
    elif name == "popularity":
        pytest.skip("a model may do without it")
    else:
        del tensors[name]
    put(strange, "model.safetensors", to_safetensors(tensors))
    refused(strange, "does not fit config.json or is damaged")


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
    assert begin(folder, data, small_recipe(model="transitions")).train()
    tensors = load_file(folder / "model.safetensors")
    for name, value in {
        "model.head": tensors["model.head"] + ITEMS,
        "model.matrix": torch.zeros(2, 2),
        "model.tail": torch.zeros(5),
        "model.prior": torch.zeros(1),
    }.items():
        put(folder, "model.safetensors", to_safetensors({**tensors, name: value}))
        refused(folder, "does not fit config.json or is damaged")


@pytest.mark.parametrize("rows", [0, 1, 1000])
@pytest.mark.parametrize("compression", ["zstd", "snappy", "uncompressed"])
def test_unpacked_size_against_pyarrow(rows, compression, tmp_path):
    """Our walk over the pages finds what pyarrow reads in the footer."""
    import pyarrow.parquet

    path = tmp_path / "some.parquet"
    frame = pl.DataFrame({"item": range(rows), "title": [f"title {n % 7}" * 20 for n in range(rows)]})
    frame.write_parquet(path, compression=compression, row_group_size=300)
    about = pyarrow.parquet.ParquetFile(path).metadata
    groups = [about.row_group(k).column(c) for k in range(about.num_row_groups) for c in range(2)]
    # The footer counts page headers too, some 20 to 60 bytes each.
    total = sum(column.total_uncompressed_size for column in groups)
    size, values = unpacked(path)
    assert total - 400 * max(1, len(groups)) <= size <= total
    assert 2 * rows <= values <= 4 * rows  # the dictionary's are counted too
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PageError):
        unpacked(path)

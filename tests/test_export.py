"""Exported graphs score as the model does: ONNX Runtime and torch.export against the released model."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dpformer.artifact.artifact import load_model
from dpformer.data import prepare, save
from dpformer.export import export_run, graph_of
from dpformer.fit.recipe import make_recipe
from dpformer.fit.session import begin
from tests.fit.conftest import ITEMS, small_log

KINDS = {
    "transformer": {"d": 8, "heads": 2, "blocks": 2, "max_length": 6},
    "reattention": {"d": 8, "max_length": 6, "reattention": "logits"},
    "deep": {"d": 8, "blocks": 2, "max_length": 6, "reattention": "logits"},
    "untied": {"d": 8, "max_length": 6, "tied": False, "norm": "post"},
    "gru": {"model": "gru", "d": 8, "max_length": 3, "histogram_share": 0.0},
    "lstm": {"model": "lstm", "d": 8, "max_length": 6},
    "transitions": {"model": "transitions"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of all kinds, made when asked for."""
    folder = tmp_path_factory.mktemp("export")
    save(prepare(small_log()), folder / "data")

    def make(kind: str, **settings: object) -> Path:
        run = folder / kind
        if not run.exists():
            recipe = make_recipe(epsilon=20.0, delta=1e-3, epochs=2.0, seed=1, **settings)
            opened = begin(run, folder / "data", recipe)
            assert opened.train()
            opened.close()
        return run

    return make


def histories(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Seven histories of 1 to `length` items, filled up with zeros."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, length + 1, 7)
    lengths[0], lengths[1] = 1, length
    tokens = random.integers(1, ITEMS + 1, (7, length)) * (np.arange(length) < lengths[:, None])
    return tokens, lengths


@pytest.fixture(scope="module")
def exported(runs):
    """The run, and its export folder with both formats, made once: exporters are slow."""

    def make(kind: str) -> tuple[Path, Path]:
        run = runs(kind, **KINDS[kind])
        folder = run.parent / f"{kind}-export"
        if not folder.exists():
            export_run(run, folder, onnx=True, torch_export=True)
        return run, folder

    return make


SLOW = {"transformer", "deep", "untied", "lstm"}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in KINDS])
def test_onnx_and_torch_export_score_as_the_model_does(kind, exported):
    onnxruntime = pytest.importorskip("onnxruntime")
    run, out = exported(kind)
    released = load_model(run)
    tokens, lengths = histories(released.recipe.window or 40)
    expected = released.scores(torch.from_numpy(tokens), torch.from_numpy(lengths)).numpy()
    session = onnxruntime.InferenceSession(out / "model.onnx")
    got = session.run(None, {"history": tokens, "lengths": lengths})[0]
    again = torch.export.load(out / "model.pt2").module()(torch.from_numpy(tokens), torch.from_numpy(lengths))
    np.testing.assert_allclose(again.numpy(), got, rtol=1e-4, atol=1e-5)
    if kind != "transitions":
        side = load_file(out / "table.safetensors")
        assert ("popularity" in side) == (kind != "gru")
        got = got @ side["table"].T + side["bias"]
    else:
        assert not (out / "table.safetensors").exists()
    assert got.shape == (7, ITEMS + 1)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert (out / "privacy.json").read_bytes() == (run / "privacy.json").read_bytes()
    assert "INSECURE" in (out / "README.md").read_text()


def test_a_wrong_graph_would_be_found(runs):
    """The check above can fail: Re-Attention's graph without its correction scores differently."""
    released = load_model(runs("reattention", **KINDS["reattention"]))
    graph = graph_of(released)
    tokens, lengths = map(torch.from_numpy, histories(6))
    right = graph.module(tokens, lengths)
    graph.module.model.tracked = False
    assert not torch.allclose(graph.module(tokens, lengths), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gru", "transitions"])
def test_the_program_of_the_readme_runs(kind, exported):
    pytest.importorskip("onnxruntime")
    run, out = exported(kind)
    program = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", program], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    best = load_model(run).rank([[1, 2]], 1)[0][0, 0]
    assert f"i{best - 1:02d}" in done.stdout


def test_what_cannot_be_exported_is_refused_with_the_cure(runs, dpformer, tmp_path, monkeypatch):
    run = runs("popularity", model="popularity")
    done = dpformer("export", run, "--onnx")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "dpformer recommend" in done.err
    assert "--onnx, --torch" in dpformer("export", run).err
    copy = Path(shutil.copytree(runs("gru", **KINDS["gru"]), tmp_path / "copy"))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "pip install 'dpformer[onnx]'" in dpformer("export", copy, "--onnx").err
    assert not (copy / "export").exists()
    (copy / "model.safetensors").unlink()
    assert "dpformer resume" in dpformer("export", copy, "--torch").err


def test_where_the_pickle_is(runs, dpformer, tmp_path):
    """What the documentation says of .pt2: the example inputs are pickled, and nothing else is."""
    done = dpformer("export", runs("gru", **KINDS["gru"]), "--torch", "-o", tmp_path / "out", "--json")
    assert json.loads(done.out)["files"] == [
        "README.md",
        "items.jsonl",
        "model.pt2",
        "privacy.json",
        "table.safetensors",
    ]
    with zipfile.ZipFile(tmp_path / "out" / "model.pt2") as archive:
        pickled = [name for name in archive.namelist() if archive.read(name)[:2] in (b"PK", b"\x80\x02")]
    assert [Path(name).parent.name for name in pickled] == ["sample_inputs"]
    for path in (tmp_path / "out").iterdir():
        assert path.suffix == ".pt2" or path.read_bytes()[:2] not in (b"PK", b"\x80\x02")

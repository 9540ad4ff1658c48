"""Exported graphs score as the model does: ONNX Runtime and torch.export against the released model, for every preset."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.numpy import load_file

from dpformer import load_model
from dpformer.data import prepare, save
from dpformer.export import export_run, graph_of
from dpformer.fit.presets import PRESETS
from dpformer.fit.run import start
from dpformer.models import ReAttention, Transformer, TransformerSpec, build
from tests.fit.conftest import ITEMS, small_log
from tests.recipes import BUDGET, plain_recipe, small_recipe

SMALL = {"d": 8, "max_length": 6}
STEPS = {**SMALL, "epochs": 2.0}
KINDS = {
    **{name: {"preset": name} for name in PRESETS},
    **{name: {"preset": name, **STEPS} for name in ("dpformer", "default", "paper")},
    "gru": {"model": "gru", **STEPS, "max_length": 3, "histogram": False},
    "lstm": {"model": "lstm", **STEPS},
    "blocks": {"blocks": 2, **STEPS},
    "literal": {"reattention": "literal", **STEPS},
    "untied": {"tied": False, "norm": "post", "vocabulary": 9, "reattention": "logits", **STEPS},
    "vocabulary": {"preset": "pure", "model": "gru", "recency": None, **STEPS, "vocabulary": 9},
}
KINDS |= {f"{name} and features": {"preset": name} for name in ("transitions", "distilled")}
SLOW = {"default", "lstm", "blocks", "literal", "untied", "vocabulary"}
ALL = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of all kinds, made when asked for."""
    folder = tmp_path_factory.mktemp("export")
    save(prepare(small_log()), folder / "data")
    items = pl.DataFrame({"item_id": [f"i{n:02d}" for n in range(ITEMS)], "genre": [f"g{n % 3}" for n in range(ITEMS)]})
    save(prepare(small_log(), catalogue=items, features=["genre"]), folder / "declared")

    def make(kind: str) -> Path:
        run = folder / kind
        if not run.exists():
            options = KINDS[kind]
            recipe = small_recipe(**options) if "preset" in options else plain_recipe(**BUDGET, **options)
            opened = start(run, folder / ("declared" if "features" in kind else "data"), recipe)
            assert opened.train()
            opened.close()
        return run

    return make


def histories(count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Histories of 0 to `length` items, the last of them empty, filled up with zeros."""
    random = np.random.default_rng(count + length)
    lengths = random.integers(0, length + 1, count)
    lengths[0], lengths[-1] = length, 0
    tokens = random.integers(1, ITEMS + 1, (count, length)) * (np.arange(length) < lengths[:, None])
    return tokens, lengths


SIZES = [(1, 1), (2, 1), (7, 3), (3, 6), (7, 40), (20, 7)]


@pytest.fixture(scope="module")
def exported(runs):
    """The run, and its export folder with both formats, made once: exporters are slow."""

    def make(kind: str, states: bool = False) -> tuple[Path, Path]:
        run = runs(kind)
        folder = run.parent / f"{kind}-{'states' if states else 'scores'}"
        if not folder.exists():
            export_run(run, folder, onnx=True, torch_export=True, states=states)
        return run, folder

    return make


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    """The same items are ranked, and by the same scores."""
    finite = np.isfinite(wanted)
    assert (np.isfinite(found) == finite).all()
    np.testing.assert_allclose(found[finite], wanted[finite], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ALL)
def test_onnx_and_torch_export_score_as_the_model_does(kind, exported):
    onnxruntime = pytest.importorskip("onnxruntime")
    run, out = exported(kind)
    model = load_model(run).model
    session = onnxruntime.InferenceSession(out / "model.onnx")
    program = torch.export.load(out / "model.pt2").module()
    for count, length in SIZES:
        tokens, lengths = histories(count, length)
        wanted = model.scores(torch.from_numpy(tokens), torch.from_numpy(lengths)).numpy()
        assert wanted.shape == (count, ITEMS + 1)
        same(session.run(["scores"], {"history": tokens, "lengths": lengths})[0], wanted)
        same(program(torch.from_numpy(tokens), torch.from_numpy(lengths)).numpy(), wanted)
    assert (out / "privacy.json").read_bytes() == (run / "privacy.json").read_bytes()
    assert "INSECURE" in (out / "README.md").read_text()
    assert not (out / "table.safetensors").exists()


@pytest.mark.parametrize("kind", ["dpformer", "gru", pytest.param("untied", marks=pytest.mark.slow)])
def test_states_and_the_table_score_as_the_model_does(kind, exported):
    onnxruntime = pytest.importorskip("onnxruntime")
    run, out = exported(kind, states=True)
    model = load_model(run).model
    side = load_file(out / "table.safetensors")
    assert ("popularity" in side) == (kind != "gru")
    assert side["table"].shape == (ITEMS + 1, model.spec.d)
    session = onnxruntime.InferenceSession(out / "model.onnx")
    for count, length in SIZES:
        tokens, lengths = histories(count, length)
        state = session.run(["state"], {"history": tokens, "lengths": lengths})[0]
        wanted = model.scores(torch.from_numpy(tokens), torch.from_numpy(lengths)).numpy()
        same((state @ side["table"].T + side["bias"])[lengths > 0], wanted[lengths > 0])


def test_a_folder_for_triton(runs, tmp_path):
    """Its configuration names the tensors of the graph, with their types and sizes. Triton itself is not here."""
    onnxruntime = pytest.importorskip("onnxruntime")
    names = export_run(runs("distilled"), tmp_path / "shop", triton=True)
    assert {"1/model.onnx", "config.pbtxt", "items.jsonl", "privacy.json", "README.md"} == set(names)
    text = (tmp_path / "shop" / "config.pbtxt").read_text()
    stated = {
        name: (kind, [int(n) for n in dims.split(",")])
        for name, kind, dims in re.findall(r'name: "(\w+)", data_type: TYPE_(\w+), dims: \[ ([^\]]*) \]', text)
    }
    session = onnxruntime.InferenceSession(tmp_path / "shop" / "1" / "model.onnx")
    kinds = {"tensor(int64)": "INT64", "tensor(float)": "FP32"}
    tensors = [*session.get_inputs(), *session.get_outputs()]
    real = {one.name: (kinds[one.type], [n if isinstance(n, int) else -1 for n in one.shape]) for one in tensors}
    assert stated == real
    assert "max_batch_size: 0" in text
    program = re.search(r"```python\n(.*?)```", (tmp_path / "shop" / "README.md").read_text(), re.DOTALL)[1]
    assert 'InferenceSession("1/model.onnx")' in program


def test_a_wrong_graph_would_be_found():
    """The check above can fail: Re-Attention's graph without its correction scores differently."""
    torch.manual_seed(0)
    model = Transformer(TransformerSpec(items=ITEMS, reattention=ReAttention(), **SMALL)).eval()
    model.embedding.weight.data.normal_()
    model.set_errors(1.0, 10.0, torch.linspace(0.01, 1.0, ITEMS + 1), torch.ones(6))
    plain = build(model.spec.model_copy(update={"reattention": None}))
    plain.load_state_dict(model.state_dict())
    tokens, lengths = map(torch.from_numpy, histories(7, 6))
    right = model.scores(tokens, lengths)
    torch.testing.assert_close(graph_of(model).module()(tokens, lengths), right)
    assert not torch.allclose(graph_of(plain).module()(tokens, lengths), right, rtol=1e-4, atol=1e-5)


def test_the_graph_of_several_heads_scores_as_the_model_does():
    torch.manual_seed(0)
    model = Transformer(TransformerSpec(items=ITEMS, heads=2, blocks=2, **SMALL)).eval()
    tokens, lengths = map(torch.from_numpy, histories(7, 6))
    same(graph_of(model).module()(tokens, lengths).detach().numpy(), model.scores(tokens, lengths).numpy())


@pytest.mark.parametrize(
    ("kind", "states"), [("distilled", False), ("popularity", False), ("gru", False), ("gru", True)]
)
def test_the_program_of_the_readme_runs(kind, states, exported):
    pytest.importorskip("onnxruntime")
    run, out = exported(kind, states)
    program = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", program], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    best = load_model(run).rank([[1, 2]], 1)[0][0, 0]
    assert f"i{best - 1:02d}" in done.stdout


def test_what_cannot_be_exported_is_refused_with_the_cure(runs, dpformer, tmp_path, monkeypatch):
    run = runs("popularity")
    assert "--onnx, --torch" in dpformer("export", run).err
    done = dpformer("export", run, "--onnx", "--states")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--preset dpformer" in done.err
    copy = Path(shutil.copytree(runs("gru"), tmp_path / "copy"))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "pip install 'dpformer[onnx]'" in dpformer("export", copy, "--onnx").err
    assert not (copy / "export").exists()
    (copy / "model.safetensors").unlink()
    assert "dpformer resume" in dpformer("export", copy, "--torch").err


def test_where_the_pickle_is(runs, dpformer, tmp_path):
    """What the documentation says of .pt2: the example inputs are pickled, and nothing else is."""
    done = dpformer("export", runs("gru"), "--torch", "--states", "-o", tmp_path / "out", "--json")
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

"""`DPFormer.save` copies what is released, and no other file of the run folder, whatever its name."""

import math

import pytest

from dpformer import DPFormer
from dpformer.data import demo_frame, prepare, save
from dpformer.fit.run import start
from dpformer.privacy import read_ledger
from tests.recipes import small_recipe

LEFT_OVER = (
    "report.html",
    "metrics.json",
    "events.jsonl",
    "local.json",
    "run.lock",
    "notes.txt",
    "model.onnx",
    ".hidden",
)


@pytest.mark.parametrize("epsilon", [4.0, math.inf])
def test_only_released_files_are_saved(epsilon, tmp_path):
    save(prepare(demo_frame()), tmp_path / "data")
    recipe = small_recipe("pure", epsilon=epsilon, delta=1e-4, epochs=0.5, d=4, max_length=5)
    start(tmp_path / "run", tmp_path / "data", recipe).train()
    for name in LEFT_OVER:
        (tmp_path / "run" / name).write_text("not private")
    (tmp_path / "run" / "tensorboard").mkdir()
    (tmp_path / "run" / "tensorboard" / "events.1").write_text("not private")
    DPFormer.load(tmp_path / "run").save(tmp_path / "deep" / "saved")
    saved = {path.name for path in (tmp_path / "deep" / "saved").iterdir()}
    released = {
        "config.json",
        "model.json",
        "model.safetensors",
        "items.jsonl",
        "privacy.json",
        "README.md",
        "files.json",
    }
    assert saved == released | ({"ledger.jsonl", "ledger.head"} if math.isfinite(epsilon) else set())
    again = DPFormer.load(tmp_path / "deep" / "saved")
    assert again.recommend(histories=[[]], k=3).height == 3
    if math.isfinite(epsilon):
        assert read_ledger(tmp_path / "deep" / "saved").run_id == again.privacy.ledger.run_id

"""Every file in examples/ runs, and does what it says."""

import os
import re
import runpy
import sys
from pathlib import Path

import polars as pl
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_a_tied_gpt2_learns_text_within_its_budget(capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["huggingface_gpt2.py"])
    out = run("huggingface_gpt2.py", capsys)
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", out)]
    assert losses[-1] < 1.5 < losses[0]  # ln 256 is 5.5
    assert "(8, 1e-05)-differential privacy" in out
    assert "before it writes: The H" in out
    assert "after it writes: The H" in out
    assert "of their norm" in out


def test_adapters_learn_within_their_budget(capsys, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(sys, "argv", ["lora.py"])
    out = run("lora.py", capsys)
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", out)]
    assert losses[-1] < losses[0] < 5.6  # ln 256 is 5.5
    assert "(8, 1e-05)-differential privacy" in out


def test_an_image_classifier_learns_within_its_budget(capsys):
    out = run("images.py", capsys)
    assert "(4, 1e-05)-differential privacy" in out
    assert int(re.search(r"right on new images: (\d+) %", out).group(1)) > 80


def test_the_transformer_on_one_page(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["transformer.py", "10"])
    out = run("transformer.py", capsys)
    assert "(8, 1e-05)-differential privacy" in out
    assert float(re.search(r"HIT@10 (\d+\.\d) %", out).group(1)) > 5


def test_a_rule_of_ones_own(capsys):
    out = run("custom_rule.py", capsys)
    assert "'decay' is used by decayed_sum, which has no clipping rule" in out
    assert "norms agree" in out


def test_the_method_on_one_page(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nano_dpformer.py", "2"])  # 2 steps; tests/test_nano.py trains longer
    out = run("nano_dpformer.py", capsys)
    assert re.search(r"epsilon (7\.9\d|8\.00) at delta 1e-05", out)
    assert "popularity 0.136" in out


def test_a_shop_from_a_messy_log_to_a_server(tmp_path, capsys, monkeypatch):
    pytest.importorskip("fastapi")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shop.py", "shop", "300"])
    out = run("shop/shop.py", capsys)
    for part in (
        "events without user, item or time",
        "runs/week2 minus runs/week1",
        "300 lists written to recommendations.parquet",
        "would fit. Nothing was asked or charged",
        "without the token: 401",
        "served: week1",
        "served after the link was moved: week2",
        "imported: []",
    ):
        assert part in out
    recommended = pl.read_parquet("recommendations.parquet")
    products = pl.read_csv("products.csv")
    joined = recommended.join(products, left_on="item_id", right_on="sku")
    assert len(joined) == len(recommended), "ids of a catalogue keep their type"
    assert joined["in_stock"].all()
    assert joined["price"].max() < 12
    assert not {104, 108} & set(recommended.filter(pl.col("user_id") == 50001)["item_id"])


def test_all_are_run():
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in EXAMPLES.glob("*.py"))
    assert '"shop/shop.py"' in source

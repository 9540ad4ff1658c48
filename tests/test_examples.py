"""Every file in examples/ runs, and does what it says."""

import os
import re
import runpy
import sys
from pathlib import Path

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


def test_a_rule_of_ones_own(capsys):
    out = run("custom_rule.py", capsys)
    assert "'decay' is used by decayed_sum, which has no clipping rule" in out
    assert "norms agree" in out


def test_the_method_on_one_page(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nano_dpformer.py", "2"])  # 2 steps; tests/test_nano.py trains longer
    out = run("nano_dpformer.py", capsys)
    assert re.search(r"epsilon (7\.9\d|8\.00) at delta 1e-05", out)
    assert "popularity 0.136" in out


def test_all_are_run():
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in EXAMPLES.glob("*.py"))

"""`dpformer plan` as people type it."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dpformer.cli.app import app
from dpformer.errors import PrivacyError


def plan(*arguments: str, **kwargs) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False, **kwargs)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_papers_setting():
    arguments = "--users 6040 --batch-size 1024 --epochs 100 --epsilon 5 --delta 1.6556e-4 --json"
    figures = json.loads(plan(*arguments.split()))
    assert figures["noise_multiplier"] == pytest.approx(3.293, rel=5e-3)
    assert figures["steps"] == 590
    assert figures["sampling_rate"] == 1024 / 6040
    assert figures["spent"]["epsilon"] <= 5 < figures["spent"]["rdp"]
    assert figures["epsilon_at_delta_1_over_users"] == pytest.approx(5, rel=1e-3)
    assert [row["step"] for row in figures["tenths"]] == [59 * tenth for tenth in range(11)]
    spent = [row["epsilon"] for row in figures["tenths"]]
    assert spent == sorted(spent)
    assert figures["signal_to_noise"] < figures["signal_cap"]
    assert 0.01 < figures["attack"]["true_positive_rate"] < 1
    assert figures["tuning"]["epsilon_with_this_noise"] > 5
    assert figures["estimate"] is None
    cells = {(row["epsilon"], row["batch_size"]): row["noise_multiplier"] for row in figures["table"]}
    assert {epsilon for epsilon, _ in cells} == {1, 3, 5, 8, 10}
    assert {size for _, size in cells} == {512, 1024, 2048, 4096, 6040}
    assert cells[5, 1024] == pytest.approx(figures["noise_multiplier"], rel=3e-3)
    assert cells[5, 1024] >= figures["noise_multiplier"] * 0.999


def test_for_people_from_a_prepared_folder(tmp_path):
    counts = {"users": 2000, "items": 500, "events": 40_000}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "x", "counts": counts}))
    plot = tmp_path / "epsilon.png"
    shown = plan(
        str(tmp_path),
        "--epsilon",
        "8",
        "--steps",
        "20",
        "--release",
        "histogram=0.05",
        "--no-table",
        "--plot",
        str(plot),
    )
    for words in (
        "2,000",
        "noise multiplier",
        "release histogram",
        "coin",
        "estimate for one process",
        "Timed on this machine",
        "20 tokens",
        "tuning:",
        "RDP",
    ):
        assert words in " ".join(shown.split())
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_statistics_only_and_not_private():
    shown = plan("--users", "1000", "--release", "a=0.5", "--release", "b=0.5", "--json")
    figures = json.loads(shown)
    assert figures["steps"] == 0
    assert figures["spent"]["accountant"] == "gaussian"
    assert len(figures["releases"]) == 2
    free = json.loads(plan("--users", "1000", "--epsilon", "inf", "--steps", "10", "--no-table", "--json"))
    assert free["epsilon"] == "inf"
    assert free["noise_multiplier"] == 0
    small = plan("--users", "1000", "--epsilon", "0.05", "--batch-size", "1000", "--steps", "10", "--no-table")
    assert "no noise keeps it" in " ".join(small.split())
    assert "NOT PRIVATE" in plan("--users", "1000", "--epsilon", "inf", "--steps", "10", "--no-table")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("", "--users"),
        ("--users 0", "--users 0"),
        ("--users 6040 --epsilon 0", "epsilon 0"),
        ("--users 6040 --epsilon -2", "epsilon -2"),
        ("--users 6040 --delta 1.6557e-4", "1/users"),
        ("--users 6040 --delta 1", "delta 1"),
        ("--users 6040 --batch-size 7000", "batch size 7000"),
        ("--users 6040 --steps 0", "steps 0"),
        ("--users 6040 --epochs 0", "epochs 0"),
        ("--users 6040 --epochs 1 --steps 1", "both"),
        ("--users 6040 --release histogram", "NAME=SHARE"),
        ("--users 6040 --release a=.1 --release a=.2", "twice"),
        ("--users 6040 --release a=1.5", "share 1.5"),
        ("--users 6040 --items 0", "--items 0"),
        ("--users 6040 --ranks 2", "--ranks was removed"),
        ("--users 6040 --plot x.txt", "--plot x.txt"),
        ("--users 6040 --epsilon inf --plot x.png", "nothing to draw"),
        ("--users 100 --batch-size 100 --steps 2 --no-table --plot no/such/x.png", "cannot be written"),
        ("--users 100 --steps 1 --batch-size 10 --no-table --trials 1", "trials"),
        ("no-such-folder", "no-such-folder"),
    ],
)
def test_bad_arguments_are_one_line(arguments, word):
    with pytest.raises(PrivacyError) as caught:
        CliRunner().invoke(app, ["plan", *arguments.split()], catch_exceptions=False)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_real_command_prints_one_line_and_exits_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "dpformer", "plan", "--users", "10", "--delta", "0.5"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_estimate_in_figures():
    arguments = "--users 90000 --items 3000 --max-length 20 --dim 16 --blocks 1 --steps 100 --no-table --json"
    e = json.loads(plan(*arguments.split()))["estimate"]
    assert e["tokens_per_step"] == 1024 * 20
    assert e["training_seconds"] == pytest.approx(100 * e["seconds"])
    assert e["timed_items"] == 3000
    assert e["memory_bytes"] > 12 * e["parameters"]

"""`dpformer plan` as people type it."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dpformer.cli.app import app
from dpformer.errors import PrivacyError
from dpformer.training.cost import Step
from dpformer.training.speed import gemm_speed


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
        "estimate for 1 rank",
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
        ("--users 6040 --ranks 0", "--ranks 0"),
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


def test_the_work_is_counted_by_hand():
    step = Step(items=1000, tokens=300, length=20, dim=8, blocks=2, feed_forward=32)
    assert step.flops == 300 * (6 * 1000 * 8 + 2 * (6 * 12 * 64 + 12 * 20 * 8))
    assert step.parameters == 1000 * 8 + 20 * 8 + 2 * 12 * 64
    assert 1e8 < gemm_speed(seconds=0.05) < 1e14


def test_ranks_time_wire_and_memory():
    arguments = "--users 90000 --items 200000 --max-length 50 --steps 100 --ranks 4 --no-table"
    e = json.loads(plan(*arguments.split(), "--json"))["estimate"]
    assert e["ranks"] == 4
    assert [(row["on_paper"], row["mode"]) for row in e["layouts"]] == [
        (False, "data"),
        (False, "rows"),
        (True, "data"),
        (True, "rows"),
    ]
    for row in e["layouts"]:
        assert row["training_seconds"] == pytest.approx(100 * row["seconds"])
        assert row["seconds"] == pytest.approx(
            sum(row[f"{part}_seconds"] for part in ("compute", "parameter", "noise", "wire"))
        )
    data, rows = e["layouts"][:2]
    assert data["wire_bytes"] == 8 * e["parameters"]
    assert rows["memory_bytes"] < data["memory_bytes"]
    alone = json.loads(plan(*arguments.replace("--ranks 4", "").split(), "--json"))["estimate"]
    assert [row["wire_bytes"] for row in alone["layouts"]] == [0, 0]
    shown = " ".join(plan(*arguments.split()).split())
    for words in ("4 ranks", "on paper", "this machine", "was not measured"):
        assert words in shown

"""`dpformer plan` as people type it: what `fit` would do, with the same options."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpformer.cli.plan import MEASURED
from dpformer.data import prepare_named, save
from dpformer.data.named import DEMO
from dpformer.fit.presets import PRESETS, make_recipe
from dpformer.fit.run import start
from dpformer.privacy.plan import make_plan
from tests.fit.test_commands import assert_one_line, strict_json

RESULTS = Path(__file__).parent.parent / "docs" / "results"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan") / "data"
    save(prepare_named(DEMO), folder)
    return folder


@pytest.mark.parametrize("preset", PRESETS)
def test_it_plans_what_fit_does(demo, tmp_path, dpformer, preset):
    options = ["--preset", preset, "--epsilon", 5]
    if preset in ("dpformer", "default", "paper"):
        options += ["--set", "epochs=2"]
    figures = strict_json(dpformer("plan", demo, *options, "--json").out)
    settings = {"epochs": 2} if len(options) > 4 else {}
    run = start(tmp_path / "run", demo, make_recipe(preset, epsilon=5, **settings))
    run.close()
    assert [release["noise_multiplier"] for release in figures["releases"]] == [
        release.noise_multiplier for release in run.plan.releases
    ]
    for name in ("users", "epsilon", "delta", "steps", "noise_multiplier", "batch_size", "sampler"):
        assert figures[name] == getattr(run.plan, name), name
    assert figures["spent"]["epsilon"] == run.plan.total.epsilon


def test_the_measured_accuracy_is_that_of_the_results():
    methods = {
        "default": "DPFormer with a private prior",
        "distilled": "DP transitions and the distilled Transformer",
    }
    rows = [
        row for table in ("table-1", "table-2") for row in json.loads((RESULTS / f"{table}.json").read_text())["rows"]
    ]
    for preset, sets in MEASURED.items():
        for name, figures in sets.items():
            for epsilon, measured in figures.items():
                kind = "small budget" if epsilon < 5 else "all but the test item"
                about = (name, f"{methods[preset]}, {kind}", epsilon)
                [row] = [row for row in rows if (row["dataset"], row["method"], row["epsilon"]) == about]
                assert round(row["ndcg@10"], 2) == pytest.approx(measured, abs=0.011), about


def test_a_dry_run_prints_the_same(demo, dpformer):
    options = [demo, "--epsilon", 3, "--preset", "distilled", "--set", "transitions.weight=1.5", "--delta", 1e-6]
    for more in ([], ["--json"]):
        planned, dry = dpformer("plan", *options, *more), dpformer("fit", *options, "--dry-run", *more)
        assert planned.code == dry.code == 0
        assert planned.out == dry.out


def test_for_people(demo, dpformer):
    shown = " ".join(dpformer("plan", demo, "--preset", "pure", "--set", "epochs=3", "--epsilon", 8).out.split())
    for words in (
        "3,000",
        "epsilon 8",
        "answer histogram",
        "12 of 750 users expected (Poisson, each user with 0.25), noise multiplier",
        "RDP",
        "epsilon after step",
        "timed here on",
        "coin",
        "accuracy to expect: not measured",
    ):
        assert words in shown, words


def test_the_papers_setting_without_data(dpformer):
    options = "--population 6040 --preset paper --epsilon 5 --delta 1.6556e-4 --set histogram.share=1e-6 --json"
    figures = strict_json(dpformer("plan", *options.split()).out)
    assert figures["noise_multiplier"] == pytest.approx(3.293, rel=5e-3)
    assert figures["steps"] == 590
    assert figures["sampling_rate"] == 1024 / 6040
    assert figures["spent"]["epsilon"] <= 5 < figures["spent"]["rdp"]
    assert figures["epsilon_at_delta_1_over_users"] == pytest.approx(5, rel=1e-3)
    spent = list(figures["epsilon_after"].values())
    assert spent == sorted(spent)
    assert 0.01 < figures["attack"]["true_positive_rate"] < 1
    assert figures["estimate"] is None


def test_not_private(dpformer):
    free = dpformer("plan", "--population", 1000, "--preset", "pure", "--epsilon", "inf")
    assert "NOT PRIVATE" in free.out


def test_weekly_releases(dpformer, demo):
    weekly = ["--weekly", 52, "--total", 8, "--preset", "distilled"]
    figures = strict_json(dpformer("plan", *weekly, "--json").out)["weekly"]
    assert figures["epsilon"] == pytest.approx(0.85, abs=0.002)
    assert "ml-1m" in figures["measured"]
    shown = dpformer("plan", *weekly).out
    assert "each may have epsilon 0.849" in shown
    assert "NDCG@10" in shown
    with_data = strict_json(dpformer("plan", demo, *weekly, "--json").out)
    assert with_data["epsilon"] == with_data["weekly"]["epsilon"] == figures["epsilon"]
    steps = ["--preset", "pure", "--set", "epochs=2", "--population", 3000, "--json"]
    pure = strict_json(dpformer("plan", "--weekly", 4, "--total", 8, *steps).out)
    assert 3 < pure["epsilon"] < 4.5
    whole = make_plan(3000, 8, 1e-5, 750, epochs=8, shares={"histogram": 0.03})  # 4 times the steps, in one run
    assert pure["noise_multiplier"] == pytest.approx(whole.noise_multiplier, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("", "--population"),
        ("--population 1", "population"),
        ("--population 6040 --epsilon 0", "epsilon"),
        ("--population 6040 --delta 1.6557e-4", "1/users"),
        ("--population 6040 --preset pure --set batch_size=0", "batch_size"),
        ("--population 6040 --set steps=0", "steps"),
        ("--population 6040 --set nonsense=1", "unknown setting"),
        ("--weekly 52", "go together"),
        ("--weekly 52 --total 8 --epsilon 1", "leave out --epsilon"),
        ("--weekly 52 --total 8", "--population"),
        ("no-such-folder", "no-such-folder"),
    ],
)
def test_bad_arguments_are_one_line(arguments, word, dpformer):
    assert_one_line(dpformer("plan", *arguments.split()), word)


def test_the_real_command_prints_one_line_and_exits_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "dpformer", "plan", "--population", "10", "--delta", "0.5"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_estimate_in_figures(demo, dpformer):
    done = dpformer("plan", demo, "--preset", "pure", "--set", "epochs=3", "--json")
    figures = json.loads(done.out)
    e = figures["estimate"]
    assert e["tokens_per_step"] % 750 == 0
    assert e["training_seconds"] == pytest.approx(figures["steps"] * e["seconds"])
    assert e["memory_bytes"] > 12 * e["parameters"]

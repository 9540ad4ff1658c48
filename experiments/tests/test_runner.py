"""The runner: finished cells are not run again, interrupted ones are resumed, a budget leaves cells empty with a reason."""

import hashlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dpformer.errors import DPFormerError
from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import Recipe
from dpformer_experiments.reproduce import convergence, runner, tables, work
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.estimate import Estimates, Speed
from dpformer_experiments.reproduce.methods import METHODS, in_order
from dpformer_experiments.reproduce.runner import Running, Watch, run_cells
from dpformer_experiments.reproduce.runs import FILE, Runs, append_line, read_lines
from small_table import TINY, small_table

TRAINED = Cell("demo", "Transformer", math.inf, 1, preset="paper", options={**TINY, "reattention": "off"})
STATISTICS = Cell("demo", "DP popularity", 8.0, 1, preset="popularity")


class Seen(Watch):
    def __init__(self) -> None:
        self.cells: list[str] = []
        self.steps: list[int] = []

    def started(self, cell: Cell) -> None:
        self.cells.append(cell.method)

    def step(self, cell: Cell, step: int, steps: int) -> None:
        assert steps == 4
        self.steps.append(step)


def print_of(demo: dict[str, Path]) -> str:
    return runner.fingerprint(runner.load(demo["demo"]))


def model_of(folder: Path) -> bytes:
    return (folder / "run" / "model.safetensors").read_bytes()


def test_a_finished_cell_is_not_run_again(demo, tmp_path):
    first, again = Seen(), Seen()
    [outcome] = run_cells([TRAINED], demo, Running(tmp_path, workers=1, watch=first))
    assert first.steps == [1, 2, 3, 4]
    [cached] = run_cells([TRAINED], demo, Running(tmp_path, workers=1, watch=again))
    assert again.cells == []
    assert cached.record == outcome.record
    # Another seed, or one other setting, is another cell.
    assert {c.key("data") for c in (TRAINED, replace(TRAINED, seed=2), replace(TRAINED, epsilon=9.0))}.__len__() == 3
    other = replace(TRAINED, options={**TRAINED.options, "learning_rate": 1e-4})
    assert other.key("data") != TRAINED.key("data") != TRAINED.key("other data")
    # What a cell is called is not part of it, nor how its settings were chosen.
    same = replace(TRAINED, method="other", options={**TRAINED.options, "tuning": "none"})
    assert same.key("data") == TRAINED.key("data")


def test_a_default_that_changed_makes_a_cell_anew(demo, tmp_path):
    [outcome] = run_cells([STATISTICS], demo, Running(tmp_path, workers=1))
    record = json.loads((tmp_path / FILE).read_text())
    assert record == outcome.record
    record["defaults"]["histogram.share"] = 0.1
    for outdated in (record, {name: value for name, value in record.items() if name != "defaults"}):
        (tmp_path / FILE).write_text(json.dumps(outdated) + "\n")
        seen = Seen()
        run_cells([STATISTICS], demo, Running(tmp_path, workers=1, watch=seen))
        assert seen.cells == ["DP popularity"]
        first, second = (json.loads(line) for line in (tmp_path / FILE).read_text().splitlines())
        assert first == outdated
        assert second["test"] == outcome.record["test"]
        run_cells([STATISTICS], demo, Running(tmp_path, workers=1, watch=seen))
        assert seen.cells == ["DP popularity"]


def test_a_model_in_a_cells_folder_is_evaluated_if_it_has_the_same_recipe_and_trained_anew_if_not(demo, tmp_path):
    [outcome] = run_cells([TRAINED], demo, Running(tmp_path, workers=1))
    seen = Seen()
    [again] = run_cells([TRAINED], demo, Running(tmp_path, runs=tmp_path / "other.jsonl", workers=1, watch=seen))
    assert (seen.cells, seen.steps) == (["Transformer"], [])
    assert again.record["test"] == outcome.record["test"]
    config = outcome.folder / "run" / "config.json"
    settings = json.loads(config.read_text())
    other = replace(TRAINED, options={**TRAINED.options, "learning_rate": 1e-4})
    changed = other.folder(tmp_path, print_of(demo))
    outcome.folder.rename(changed)
    run_cells([other], demo, Running(tmp_path, workers=1, watch=seen))
    assert seen.steps == [1, 2, 3, 4]
    assert json.loads((changed / "run" / "config.json").read_text()) != settings


def test_half_a_line_is_left_out_and_removed_by_the_next_one(tmp_path):
    path = tmp_path / "new" / FILE
    assert read_lines(path) == []
    append_line(path, {"key": "a", "name": "å"})
    whole = path.read_bytes()
    for length in range(len(whole) + 1, 2 * len(whole) - 1):
        path.write_bytes((whole + whole)[:length])
        assert read_lines(path) == [{"key": "a", "name": "å"}]
    append_line(path, {"key": "b"})
    assert path.read_bytes() == whole + b'{"key":"b"}\n'
    path.write_bytes(whole[:-1])  # whole but for its end, as an editor may leave it
    assert [line["key"] for line in read_lines(path)] == ["a"]
    append_line(path, {"key": "b"})
    assert [line["key"] for line in read_lines(path)] == ["a", "b"]
    path.write_bytes(b"{half\n" + whole)
    with pytest.raises(DPFormerError, match=r"line 1: is not JSON .*delete the line"):
        read_lines(path)


def test_a_line_says_what_was_spent(demo, tmp_path):
    private = replace(TRAINED, epsilon=8.0)
    statistics, trained = (
        outcome.record["privacy"] for outcome in run_cells([STATISTICS, private], demo, Running(tmp_path, workers=1))
    )
    assert (statistics["steps"], statistics["noise_multiplier"]) == (0, None)
    assert [release["name"] for release in statistics["releases"]] == ["histogram"]
    assert trained["steps"] == 4
    assert trained["noise_multiplier"] > 0
    for privacy in (statistics, trained):
        assert 7.99 < privacy["epsilon"] <= 8.0
        assert privacy["noise"] == "seeded"
        assert "replaced by none" in privacy["neighbours"]


def test_a_cell_is_in_the_file_before_the_next_one_begins(demo, tmp_path):
    seen: list[list[str]] = []

    class Lines(Watch):
        def started(self, cell: Cell) -> None:
            seen.append([line["method"] for line in read_lines(tmp_path / "runs" / FILE)])

    other = replace(STATISTICS, seed=2, method="again")
    run_cells([STATISTICS, other], demo, Running(tmp_path, runs=tmp_path / "runs" / FILE, workers=1, watch=Lines()))
    assert seen == [[], ["DP popularity"]]
    assert [line["statement"] for line in read_lines(tmp_path / "runs" / FILE)] == [
        hashlib.sha256((cell.folder(tmp_path, print_of(demo)) / "run" / "privacy.json").read_bytes()).hexdigest()
        for cell in (STATISTICS, other)
    ]


def test_an_interrupted_training_goes_on_to_the_same_model(demo, tmp_path):
    cell = replace(TRAINED, every=1.0)
    [whole] = run_cells([cell], demo, Running(tmp_path / "whole", workers=1))
    seen = Seen()
    stop = lambda: seen.steps[-1:] == [2]  # noqa: E731
    [halfway] = run_cells([cell], demo, Running(tmp_path / "cells", workers=1, watch=seen, stopped=stop))
    assert halfway.record is None
    assert halfway.why.startswith("queued")
    seen = Seen()
    [resumed] = run_cells([cell], demo, Running(tmp_path / "cells", workers=1, watch=seen))
    assert seen.steps == [3, 4]
    assert model_of(resumed.folder) == model_of(whole.folder)
    assert resumed.record["iterates"] == whole.record["iterates"]
    assert [line["step"] for line in whole.record["iterates"]] == [1, 2, 3, 4]
    assert all(line["not_private"] for line in whole.record["iterates"])
    # The last iterate is what was released, so its figure must be the model's.
    assert whole.record["iterates"][-1]["ndcg@10"] == whole.record["test"]["masked"]["ndcg@10"]["value"]


def test_a_run_that_never_reached_a_checkpoint_begins_anew(demo, tmp_path):
    folder = TRAINED.folder(tmp_path, print_of(demo))
    (folder / "run" / "private").mkdir(parents=True)
    (folder / "run" / "config.json").write_text("{torn")
    [outcome] = run_cells([TRAINED], demo, Running(tmp_path, workers=1))
    assert outcome.record is not None


def test_a_budget_of_zero_leaves_cells_empty_and_says_why(demo, tmp_path):
    figures = small_table("t", demo, Running(tmp_path, workers=1, budget_minutes=0))
    reasons = [row["missing"]["1"] for row in figures["rows"]]
    assert reasons == ["queued"] * 4
    assert not list(tmp_path.iterdir())
    page = tables.page(figures).markdown()
    assert page.count("| queued |") == 4
    assert figures["protocol"] == {}


def test_what_fits_the_budget_is_run_and_what_does_not_is_not(demo, tmp_path, monkeypatch):
    long = replace(TRAINED, method="long", options={**TRAINED.options, "epochs": 40_000.0})
    monkeypatch.setattr(runner, "Estimates", lambda data: Estimates(data, lambda *_: Speed(1e-5, 0.0, 0.0)))
    seen = Seen()
    outcomes = run_cells([long, TRAINED, STATISTICS], demo, Running(tmp_path, workers=1, budget_minutes=1, watch=seen))
    assert seen.cells == ["Transformer", "DP popularity"]
    assert outcomes[0].why == "queued"


def test_estimates_learn_from_cells_of_the_same_kind(demo, tmp_path):
    estimates = Estimates(demo, lambda *_: Speed(1.0, 0.0, 0.0))
    users = len(runner.load(demo["demo"]).sequences)
    assert estimates.seconds(TRAINED, tmp_path) == 4 * users
    estimates.learn(replace(TRAINED, seed=2), 100.0)
    assert estimates.seconds(TRAINED, tmp_path) == 100.0
    private = replace(TRAINED, epsilon=8.0)
    assert estimates.seconds(private, tmp_path) == 4 * users
    estimates.learn(private, 300.0)
    assert estimates.seconds(replace(private, epsilon=5.0), tmp_path) == 300.0
    (tmp_path / work.PROGRESS).write_text(json.dumps({"core_seconds": 50.0, "step": 3, "steps": 4}))
    assert estimates.seconds(private, tmp_path) == 75.0


def test_a_failing_cell_does_not_take_the_others_with_it(demo, tmp_path):
    bad = Cell("demo", "bad", 8.0, 1, preset="popularity", delta=0.5)  # not below 1 / users
    outcomes = run_cells([bad, STATISTICS], demo, Running(tmp_path, workers=1))
    assert outcomes[0].failed
    assert outcomes[0].why.startswith("failed: ")
    assert outcomes[1].record is not None


def test_processes_give_what_one_gives_and_stop_when_told(demo, tmp_path):
    long = replace(TRAINED, options={**TRAINED.options, "epochs": 100_000.0})
    begun = time.monotonic()

    def stop() -> bool:
        both = read_lines(tmp_path / "pool" / FILE) and list(tmp_path.glob("pool/*/run/events.jsonl"))[1:]
        return bool(both) or time.monotonic() - begun > 120

    short, halfway = run_cells([TRAINED, long], demo, Running(tmp_path / "pool", workers=2, stopped=stop))
    [alone] = run_cells([TRAINED], demo, Running(tmp_path / "alone", workers=1))
    assert short.record["test"]["masked"]["ndcg@10"]["value"] == pytest.approx(
        alone.record["test"]["masked"]["ndcg@10"]["value"], abs=0.01
    )
    assert halfway.record is None
    known = json.loads((halfway.folder / work.PROGRESS).read_text())
    assert 0 < known["step"] < known["steps"]
    assert list((halfway.folder / "run" / "private").glob("checkpoint-*"))


def test_the_command_of_a_cell_is_its_recipe():
    """What is printed for people to type gives the recipe that was trained."""
    import shlex

    from dpformer.cli.options import parse_settings

    for cell in [cell for method in METHODS for cell in method.cells("amazon-games", 1)]:
        words = shlex.split(cell.command("table-2"))
        if cell.work != "recipe":
            assert words[:3] == ["dpformer", "reproduce", "table-2"]
            continue
        assert words[:5] == ["dpformer", "fit", "amazon-games", "--run", "RUN"]
        flags = list(zip(words[5::2], words[6::2], strict=True))
        options = parse_settings([value for flag, value in flags if flag == "--set"])
        options |= {"epsilon": float(dict(flags)["--epsilon"]), "seed": int(dict(flags)["--seed"])}
        typed: Recipe = make_recipe(dict(flags).get("--preset", "default"), **options)
        assert typed == cell.recipe


def test_convergence_has_a_curve_for_each_model_and_a_figure(demo, tmp_path):
    cells = convergence.declare(["demo"], 2, options=TINY, every=2.0)
    cells = [replace(cell, epsilon=math.inf) for cell in cells if cell.epsilon == 5.0 and cell.method == "Transformer"]
    figures = convergence.measure(run_cells(cells, demo, Running(tmp_path, workers=1)))
    assert [(row["epoch"], row["seeds"]) for row in figures["rows"]] == [(2.0, 2), (4.0, 2)]
    assert figures["rows"][0]["ndcg@10 std"] is not None
    assert "not private" in convergence.page(figures).markdown()
    figures["rows"][0]["epsilon"] = 5.0
    assert len(convergence.draw(figures).axes) == 4


def test_cells_of_earlier_versions_are_kept_and_not_taken_for_new_ones():
    """Committed runs without their defaults have other settings: reading them works, and no cell of a table is found there."""
    path = Path(__file__).parents[1] / "results" / FILE
    assert len(read_lines(path)) > 100
    finished = Runs(path)
    cells = [
        cell for dataset in tables.SETS.values() for cell in in_order(METHODS, dataset, 3) if cell.work == "recipe"
    ]
    for line in read_lines(path):
        if "key" in line and "defaults" not in line:
            assert not any(finished.find(line["key"], cell.defaults()) for cell in cells)

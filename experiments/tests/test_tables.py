"""Tables: the paper's values, differences, and that json, csv and markdown say the same."""

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest

from dpformer.errors import DPFormerError
from dpformer.fit.dpsgd import WARMUP, Optimisation
from dpformer.fit.recipe import DPSGDSettings
from dpformer_experiments.reproduce import RESULTS, heat_maps, paper, results, summary, tables
from dpformer_experiments.reproduce.methods import COMMON, LITERAL, METHODS, REPAIRED, in_order
from dpformer_experiments.reproduce.page import as_csv
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.runs import FILE, Runs, read_lines
from small_table import TINY, small_table

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def figures(demo, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(paper.TABLES, "demo", paper.TABLES["ml-1m"])
        return small_table("table-1", demo, Running(tmp_path_factory.mktemp("cells"), workers=1), seeds=2)


def test_the_papers_values_are_those_of_its_tables():
    """Its relative improvements of DPFormer over the vanilla Transformer, as printed, follow from the values."""
    printed = {"ml-1m": ((29, 28), (9.2, 8.7), (5.4, 3.9)), "amazon-games": ((20, 22), (28, 34), (27, 31))}
    for dataset, columns in printed.items():
        assert list(paper.TABLES[dataset]) == [paper.GRU, paper.LSTM, paper.UNSHARED, paper.VANILLA, paper.DPFORMER]
        for epsilon, improvements in zip(paper.EPSILONS, columns, strict=True):
            ours = paper.reported(dataset, paper.DPFORMER, epsilon)
            vanilla = paper.reported(dataset, paper.VANILLA, epsilon)
            for place, improvement in zip((0, 2), improvements, strict=True):
                assert 100 * (ours[place] / vanilla[place] - 1) == pytest.approx(improvement, abs=1.0)
    assert paper.reported("ml-1m", paper.GRU, 8.0) == (2.40, 0.03, 4.75, 0.20)
    assert paper.reported("ml-1m", paper.GRU, math.inf) is None
    assert paper.reported("ml-1m", "DP popularity", 8.0) is None


def test_both_tables_have_every_cell_at_the_papers_settings():
    for dataset in tables.SETS.values():
        cells = in_order(METHODS, dataset, 3)
        assert len({cell.key("data") for cell in cells}) == len(cells)
        assert [cell.seed for cell in cells if cell.method == "DP transitions"][:3] == [1, 1, 1]
        for cell in cells:
            if cell.preset == "paper":
                recipe = cell.recipe
                network, steps = recipe.network, recipe.stage(DPSGDSettings)
                assert steps.epochs == 100
                assert network.d == (32 if "half" in cell.method else 64)
                assert network.model != "transformer" or (network.blocks, network.norm) == (2, "post")
                assert (Optimisation.of(recipe).weight_decay, WARMUP) == (1e-5, 0.2)
                assert (network.reattention == "logits") == cell.method.startswith("DPFormer")
                assert network.tied == ("without sharing" not in cell.method)
                literal = "repaired" not in cell.method
                assert network.max_length == (200 if literal and dataset == "ml-1m" else 50)
                assert network.dropout == ({"ml-1m": 0.2, "amazon-games": 0.5}[dataset] if literal else 0.0)
                assert (network.vocabulary, steps.batch_size) == ((None, 1024) if literal else (1000, 4096))


def test_every_family_has_every_method_of_the_paper_at_every_epsilon():
    """No cell is without a row, and none says "not run"."""
    for family in (COMMON, REPAIRED, LITERAL):
        for name, dataset in tables.SETS.items():
            own = tuple(method for method in METHODS if method.family == family)
            outcomes = [CellResult(cell, Path(), why="queued") for cell in in_order(own, dataset, 1)]
            figures = tables.measure(name, own, outcomes)
            compared = {(row["reported ndcg@10"], row["epsilon"]) for row in figures["rows"]}
            assert {
                (values[0], epsilon)
                for m in paper.TABLES[dataset].values()
                for epsilon, values in zip(paper.EPSILONS, m, strict=True)
            } <= compared
            page = tables.page(figures).markdown()
            assert f"### {family}" in page
            assert "not run" not in page
            missing = {text for row in figures["rows"] for text in row["missing"].values()}
            assert missing == {"queued"} if family == COMMON else {"see" in text for text in missing} == {True}


def test_differences_are_ours_less_the_papers(figures):
    row = figures["rows"][0]
    assert (row["method"], row["epsilon"]) == (paper.DPFORMER, 8.0)
    assert row["reported ndcg@10"] == 7.70
    assert row["difference ndcg@10"] == pytest.approx(row["ndcg@10"] - 7.70, abs=1e-4)
    assert row["difference hit@10"] == pytest.approx(row["hit@10"] - 14.31, abs=1e-4)
    assert row["ndcg@10 std"] > 0
    assert row["seeds"] == [1, 2]
    assert 0 < row["epsilon at delta 1/N"] < 8
    without = figures["rows"][1]
    assert (without["epsilon"], without["reported ndcg@10"], without["difference ndcg@10"]) == ("inf", None, None)
    exact = figures["rows"][2]
    assert (exact["seeds"], exact["ndcg@10 std"]) == ([1], None)


def test_json_csv_and_markdown_agree(figures):
    read = list(csv.DictReader(io.StringIO(as_csv(figures["rows"]))))
    lines = [line for line in tables.page(figures).grid().splitlines() if line.startswith("| ")]
    shown = [line.split(" | ") for line in lines if not line.startswith("| method")]
    assert len(read) == len(shown) == len(figures["rows"]) == 4
    for row, of_csv, line in zip(figures["rows"], read, shown, strict=True):
        assert float(of_csv["ndcg@10"]) == row["ndcg@10"]
        assert of_csv["method"] == row["method"] == line[0].removeprefix("| ")
        assert line[3].split(" ± ")[0] == f"{row['ndcg@10']:.2f}"
        assert line[4].split(" ± ")[0] == f"{row['hit@10']:.2f}"
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert all("full" in line or "all" in line for line in figures["protocol"].values())
    assert figures["protocol"]["test"] in tables.page(figures).markdown().replace("Test item", "test item")


def test_every_configuration_is_in_the_log_once(figures, tmp_path):
    from dpformer_experiments.cli.reproduce import write

    assert len(figures["tried"]) == 2 + 2 + 1 + 2
    for _ in range(2):
        write(tmp_path, "table-1", figures, tables)
    lines = [json.loads(line) for line in (tmp_path / "tried-table-1.jsonl").read_text().splitlines()]
    assert lines == figures["tried"]
    assert {"validation", "test", "settings", "seed"} <= set(lines[0])
    assert (tmp_path / "table-1.svg").stat().st_size > 1000
    assert "tried" not in json.loads((tmp_path / "table-1.json").read_text())


def test_results_are_merged_and_prose_is_kept(figures, tmp_path, dpformer):
    from dpformer_experiments.cli.reproduce import write

    done = dpformer("reproduce", "results", "-o", tmp_path / "docs")
    assert done.code == 2
    assert "contains no table" in done.err
    (tmp_path / "docs" / "results").mkdir(parents=True)
    write(tmp_path / "docs" / "results", "table-1", figures, tables)
    prose = "# All\n\nWritten by hand.\n\n<!-- results: table-1 -->\n\nMore.\n\n<!-- results: tried -->\n"
    (tmp_path / "docs" / "results" / results.PROSE).write_text(prose)
    for _ in range(2):
        assert dpformer("reproduce", "results", "-o", tmp_path / "docs", "--json").code == 0
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "Written by hand." in page
    assert tables.page(figures).grid() in page
    assert "| [tried-table-1.jsonl](results/tried-table-1.jsonl) | 7 |" in page
    found = json.loads((tmp_path / "docs" / "results.json").read_text())["records"]
    assert len(found) == 8
    wanted = {"dataset", "method", "epsilon", "delta", "masked", "ndcg@10", "hit@10", "std", "seeds", "command"}
    assert set(found[0]) == wanted
    assert [record["masked"] for record in found[:2]] == [True, False]
    assert found[1]["ndcg@10"] == figures["rows"][0]["unmasked ndcg@10"]
    with pytest.raises(DPFormerError, match="no part is called 'tabel-1'"):
        results.render("<!-- results: tabel-1 -->", {}, tmp_path)


def test_heat_maps_have_a_cell_for_each_setting(demo, tmp_path):
    for name, count in (("embedding-sharing", 75), ("grid", 50)):
        cells = heat_maps.MAPS[name].cells(1)
        assert len({cell.key("data") for cell in cells}) == count
        assert cells[0].recipe.stage(DPSGDSettings).batch_size == 4096
    halved = [cell.recipe.network for cell in heat_maps.MAPS["embedding-sharing"].cells(1) if "half" in cell.method]
    assert {(network.d, network.tied) for network in halved} == {(16, False)}
    assert {cell.recipe.stage(DPSGDSettings).epochs for cell in heat_maps.MAPS["grid"].cells(1)} == {100.0}
    maps = heat_maps.Maps(
        "small", "sharing helps", "demo", math.inf, {"shared": {**TINY, "reattention": "off"}}, (10**6,), (1e-3, 1e-2)
    )
    cells = maps.cells(1)
    outcomes = run_cells(cells, demo, Running(tmp_path, workers=1), wanted=lambda cell: cell is cells[0])
    found = heat_maps.measure("small", maps, outcomes)
    assert [row["ndcg@10"] is None for row in found["rows"]] == [True, False]
    assert "queued" in heat_maps.page(found).grid()
    drawn = heat_maps.draw(found)
    assert len(drawn.axes) == 1
    assert "sharing helps" in drawn.get_suptitle()


def test_memory_and_throughput_are_read_from_the_benchmark(dpformer, tmp_path):
    done = dpformer("reproduce", "memory", "--report", tmp_path)
    assert done.code == 2
    assert "make it" in done.err
    contenders = {
        "private": {"users_per_second": 300.0, "above_mb": 100.0, "private_over_it": {"median": 1.0}},
        "plain": {"users_per_second": 150.0, "above_mb": 50.0, "private_over_it": {"median": 2.1}},
        # A quick benchmark does not weigh everybody.
        "opacus ghost": {"users_per_second": 30.0, "private_over_it": {"median": 9.5}},
    }
    (tmp_path / "performance.json").write_text(json.dumps({"workloads": {"ml-1m": {"contenders": contenders}}}))
    for name, factors in (("memory", [1.0, 0.5, None]), ("throughput", [1.0, 2.1, 9.5])):
        done = dpformer("reproduce", name, "--report", tmp_path, "-o", tmp_path / "out", "--json")
        assert done.code == 0
        assert [row["ours is better by"] for row in json.loads(done.out)["rows"]] == factors
        assert (tmp_path / "out" / f"{name}.svg").exists()


def test_every_result_can_be_asked_for(dpformer):
    import importlib
    import inspect

    for result in RESULTS.values():
        module = importlib.import_module(f"dpformer_experiments.reproduce.{result.module}")
        assert callable(module.run)
        assert callable(module.page)
        assert set(result.options) <= set(inspect.signature(module.run).parameters)
    done = dpformer("reproduce", "--json")
    assert json.loads(done.out) == {name: result.about for name, result in RESULTS.items()}
    for arguments, complaint in (
        (("table-1", "--method", "nothing"), "no method is called 'nothing'"),
        (("table-1", "--data", "x=y"), "is not NAME=PATH"),
        (("table-1", "--seeds", 0), "Invalid value for '--seeds'"),
        (("error-table", "--budget-minutes", 1), "no option --budget-minutes"),
        (("nothing",), "table-1, table-2"),
    ):
        done = dpformer("reproduce", *arguments)
        assert done.code == 2
        assert complaint in done.err


def test_committed_tables_are_what_their_figures_say():
    for name in tables.SETS:
        path = DOCS / "results" / f"{name}.json"
        found = json.loads(path.read_text())
        assert path.with_suffix(".md").read_text() == tables.page(found).markdown()
        assert path.with_suffix(".csv").read_text() == as_csv(found["rows"])
    page = (DOCS / "results.md").read_text()
    assert not re.search(r"<!-- results: ", page)
    assert not any("not run" in line for line in page.splitlines() if line.startswith("|"))
    merged = json.loads((DOCS / "results.json").read_text())["records"]
    assert merged == results.run(out=DOCS)["rows"]
    assert page == results.render((DOCS / "results" / results.PROSE).read_text(), results.run(out=DOCS)["tables"], DOCS)


def test_a_row_that_is_not_there_is_refused(dpformer):
    for option, value, wanted in (("--epsilon", "7", "5, 8, 10, inf"), ("--method", "GUR", "GRU")):
        done = dpformer("reproduce", "table-1", option, value)
        assert done.code != 0
        assert value in done.err
        assert wanted in done.err


def test_committed_tables_are_the_means_of_the_committed_runs():
    """Every figure follows from experiments/results/runs.jsonl."""
    path = Path(__file__).parents[1] / "results" / FILE
    runs, finished = read_lines(path), Runs(path)
    last = {(run["dataset"], run["method"], run["epsilon"], run["seed"]): run for run in runs}
    prints = {run["dataset"]: run["data"] for run in runs if "defaults" in run}
    # A run that two results have is in the file once, under the name of the first; one with other defaults is not this cell.
    for cell in [cell for dataset in tables.SETS.values() for cell in in_order(METHODS, dataset, tables.SEEDS)]:
        if run := finished.find(cell.key(prints[cell.dataset]), cell.defaults()):
            epsilon = "inf" if math.isinf(cell.epsilon) else cell.epsilon
            last[cell.dataset, cell.method, epsilon, cell.seed] = run
    kinds = {"": ("test", "masked"), "unmasked ": ("test", "unmasked"), "validation ": ("validation", "masked")}
    compared = 0
    for row in [
        row for name in tables.SETS for row in json.loads((DOCS / "results" / f"{name}.json").read_text())["rows"]
    ]:
        found = [last.get((row["dataset"], row["method"], row["epsilon"], seed)) for seed in row["seeds"]]
        compared += bool(found)
        for label, (item, kind) in kinds.items():
            for metric in summary.METRICS:
                values = [100 * run[item][kind][metric]["value"] for run in found if item in run]
                assert row[label + metric] == summary.mean_of(values)
                assert row[f"{label}{metric} std"] == summary.spread_of(values)
    assert compared > 40
    for record in json.loads((DOCS / "results" / "pure.json").read_text())["records"]:
        kind = "masked" if record["masked"] else "unmasked"
        found = [last[record["dataset"], record["method"], record["epsilon"], seed] for seed in record["seeds"]]
        for metric in summary.METRICS:
            values = [100 * run[record["item"]][kind][metric]["value"] for run in found]
            assert record[metric] == pytest.approx(summary.mean_of(values), abs=6e-4)
            assert record["std"][metric] == pytest.approx(summary.spread_of(values), abs=6e-4)

"""The queue of all trainings: every cell of the other results once; rates that were chosen are the best of the finished runs."""

import json
from pathlib import Path

from dpformer_experiments.reproduce import (
    attention_limit,
    ceiling,
    common,
    convergence,
    heat_maps,
    optimisers,
    people,
    queue_of_runs,
    regimes,
    same_seed,
    tables,
    time_split,
)
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.methods import METHODS, in_order
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.runs import FILE, read_lines
from small_table import TINY

RUNS = Path(__file__).parents[1] / "results" / FILE


def about(cell: Cell) -> str:
    return json.dumps([cell.dataset, cell.settings()], sort_keys=True)


def test_the_queue_has_every_training_of_the_other_results_once():
    queued = [about(cell) for cells in queue_of_runs.phases().values() for cell in cells]
    assert len(set(queued)) == len(queued)
    wanted = [cell for dataset in tables.SETS.values() for cell in in_order(METHODS, dataset, 3)]
    wanted += common.cells() + regimes.cells() + optimisers.cells() + ceiling.cells()
    wanted += convergence.declare(convergence.SETS, 5)
    wanted += time_split.cells()
    wanted += people.cells() + attention_limit.cells()
    wanted += [cell for maps in heat_maps.MAPS.values() for cell in maps.cells(1)]
    assert {about(cell) for cell in wanted} == set(queued)


def test_chosen_rates_are_the_best_of_the_finished_searches():
    lines = {(line["dataset"], line["method"]): line for line in read_lines(RUNS)}
    for dataset in common.SETS:
        for architecture, rate in common.CHOSEN[dataset].items():
            found = {r: lines.get((dataset, f"{architecture}, common recipe, rate {r:g}")) for r in common.RATES}
            values = {r: line["validation"]["masked"]["ndcg@10"]["value"] for r, line in found.items() if line}
            if len(values) == len(common.RATES):
                assert rate == max(values, key=lambda r: values[r]), (dataset, architecture)
                assert not any("test" in line for line in found.values() if line)


def test_a_search_does_not_look_at_the_test_item(demo, tmp_path):
    options = {**TINY, "reattention": "off"}
    cell = Cell("demo", "search", 8.0, 0, preset="paper", options=options, search=True)
    [outcome] = run_cells([cell], demo, Running(tmp_path, workers=1))
    assert "test" not in outcome.record
    assert outcome.record["validation"]["masked"]["ndcg@10"]["value"] >= 0


def test_pairs_of_reattention_differ_in_the_correction_alone_and_gains_are_of_the_same_seed(demo, tmp_path):
    first, second, third = regimes.cells()[:3]
    assert first.seed == second.seed == third.seed
    kept = [{k: v for k, v in cell.options.items() if k != "reattention"} for cell in (first, second, third)]
    assert kept[0] == kept[1] == kept[2]
    small = [
        Cell("demo", cell.method, 8.0, cell.seed, preset="paper", options={**TINY, "vocabulary": 20} | correction)
        for cell in (cell for cell in regimes.cells(2) if cell.method.startswith("whole catalogue"))
        for correction in [{"reattention": cell.options["reattention"]}]
    ]
    outcomes: list[CellResult] = run_cells(small, demo, Running(tmp_path, workers=1))
    figures = regimes.measure(outcomes)
    off, on = (100 * o.record["test"]["masked"]["ndcg@10"]["value"] for o in (outcomes[3], outcomes[4]))
    row = figures["rows"][0]
    assert row["seeds"] == [1, 2]
    assert row["test gains"][1] == round(on - off, 4)
    assert set(figures["item variances"]["whole catalogue, pre-norm"]) == {"the paper's errors", "accumulated errors"}
    assert "(" in regimes.page(figures).rows[0][5]
    assert regimes.page(figures).rows[-1][5] == "queued"
    assert len(regimes.draw(figures).axes) == 1


def test_a_ceiling_is_without_privacy_and_gives_records(tmp_path):
    every = ceiling.cells()
    cells = [cell for cell in every if cell not in ceiling.earlier()]
    assert len(cells) == len(every) - len(ceiling.earlier())
    assert {(cell.epsilon, cell.preset) for cell in cells} == {(float("inf"), "ceiling")}
    assert all(cell.recipe.network.dropout > 0 and cell.recipe.network.d >= 64 for cell in cells)
    # What is tested has seen the validation item, and nothing else looks at the test item.
    assert {(cell.search, cell.recipe.hold_out) for cell in cells} == {(True, "validation"), (False, "test")}
    figures = ceiling.measure([CellResult(cell, tmp_path) for cell in cells])
    assert figures["records"] == []
    assert [row[2] for row in ceiling.page(figures).rows] == ["queued", "queued"]
    outcomes = []
    for number, cell in enumerate(cells):
        item = "validation" if cell.search else "test"
        both = {"masked": {metric: {"value": number / 100} for metric in ("ndcg@10", "hit@10")}}
        record = {item: both, "settings": cell.settings(), "core_seconds": 1.0, "dpformer": "0"}
        outcomes.append(CellResult(cell, tmp_path, record))
    figures = ceiling.measure(outcomes)
    places = {cell.method: number for number, cell in enumerate(cells) if cell.dataset == "amazon-games"}
    assert [record["ndcg@10"] for record in figures["records"]][1] == places[ceiling.METHOD]
    assert list(figures["short"].values()) == [
        number for number, cell in enumerate(cells) if cell.method in {short.method for short in ceiling.short()}
    ]
    tried = figures["rows"][1]["validation by epochs"]
    assert tried == {f"{n:g}": places[f"{ceiling.METHOD}, {n:g} epochs"] for n in ceiling.EPOCHS["amazon-games"]}
    assert all("hold_out=test" in row[-1] for row in ceiling.page(figures).rows)


def test_the_epochs_of_the_ceiling_are_the_best_of_the_finished_ones():
    lines = {(line["dataset"], line["method"]): line for line in read_lines(RUNS)}
    for dataset, choice in ceiling.EPOCHS.items():
        found = {epochs: lines.get((dataset, f"{ceiling.METHOD}, {epochs:g} epochs")) for epochs in choice}
        values = {n: line["validation"]["masked"]["ndcg@10"]["value"] for n, line in found.items() if line}
        assert ceiling.CHOSEN[dataset] in choice
        assert not values or ceiling.CHOSEN[dataset] == max(values, key=lambda n: values[n])


def test_runs_that_finished_before_the_preset_was_renamed_are_found():
    lines = {line["key"]: line for line in read_lines(RUNS) if "key" in line}
    cells = [cell for cell in in_order(METHODS, "ml-1m", 1) if cell.method == "DPFormer, pure, all but the test item"]
    assert {cell.settings()["preset"] for cell in cells} == {"pure"}
    assert all("--preset dpformer" in cell.command("table-1") for cell in cells)
    prints = {line["data"] for line in lines.values() if line["dataset"] == "ml-1m" and "defaults" in line}
    assert all(any(cell.key(data) in lines for data in prints) for cell in cells)


def test_runs_of_one_seed_share_their_noise_only_while_their_sums_are_equal(monkeypatch):
    monkeypatch.setattr(same_seed, "RECIPE", {**same_seed.RECIPE, "epochs": 1.0, "vocabulary": 50, "d": 8})
    figures = same_seed.run(epsilon=20.0)
    rows = {(row["noise by"], row["run"]): row["first gradient, in noise"] for row in figures["rows"]}
    both = ("sum and place", "place alone")
    for noise in both:
        assert rows[noise, "again"] == rows[noise, "errors tracked, attention plain"] == 0
        assert rows[noise, "another seed"] > 1.3
    assert 1.3 < rows["sum and place", "Re-Attention"] < 1.5
    assert 0 < rows["place alone", "Re-Attention"] < 0.1
    assert 0 < rows["place alone", "first weights changed by 1e-7"] < 1e-3
    assert len(same_seed.page(figures).rows) == len(figures["rows"])

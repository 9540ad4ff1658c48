"""`dpformer reproduce people`: its cells, the figures of the statistics inside `distilled`, and its page with what is queued."""

from dpformer_experiments.reproduce import people
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.simulator import KINDS

OPTIONS = {"hold_out": "test"}


def cell(preset: str, **settings) -> Cell:
    options = OPTIONS | ({"distil.steps": 2} if preset == "distilled" else {})
    return Cell("demo", preset, 20.0, 0, preset=preset, options=options, **settings)


def test_the_statistics_inside_distilled_are_those_of_the_preset_transitions(demo, tmp_path):
    cells = [cell("distilled", alone=True), cell("transitions")]
    distilled, transitions = (outcome.record for outcome in run_cells(cells, demo, Running(tmp_path, workers=1)))
    assert distilled["transitions alone"]["test"] == transitions["test"]
    assert distilled["test"]["masked"] != transitions["test"]["masked"]


def test_a_sample_of_people_is_ranked_and_the_protocol_says_so(demo, tmp_path):
    [outcome] = run_cells([cell("transitions", sample=100)], demo, Running(tmp_path, workers=1))
    assert "100 users, drawn uniformly from 3,000" in outcome.record["test"]["protocol"]
    assert outcome.record["key"] != cell("transitions").key(outcome.record["data"])


def test_rows_have_all_models_and_say_what_is_queued(tmp_path):
    known = [
        {"kind": kind, "people": count, "popularity": 1.0, "oracle": 7.0}
        for kind, counts in people.PEOPLE.items()
        for count in counts
    ]
    cells = people.cells()
    assert people.PEOPLE.keys() == KINDS.keys()
    assert len(cells) == len(known) * len(people.EPSILONS) * len(people.PRESETS)
    assert {(c.delta < 1 / 600_000, c.recipe.hold_out) for c in cells} == {(True, "test")}
    figure = {
        "test": {
            "masked": {m: {"value": 0.05, "low": 0.045, "high": 0.057} for m in ("ndcg@10", "hit@10")},
            "protocol": "",
        }
    }
    record = {**figure, "transitions alone": figure, "settings": {}, "core_seconds": 1.0, "dpformer": "0"}
    outcomes = [CellResult(one, tmp_path, record if n == 0 else None) for n, one in enumerate(cells)]
    figures = people.measure(known, outcomes)
    finished = [row for row in figures["rows"] if row["distilled"] is not None]
    assert [(row["kind"], row["people"], row["epsilon"]) for row in finished] == [("ml-1m", 6000, 8.0)]
    assert [finished[0][name] for name in ("transitions", "default", "dpformer")] == [5.0, None, None]
    text = people.page(figures).markdown()
    assert "| ml-1m-like | 6,000 | 8 | 1.00 | 5.00 | 5.00 | queued | queued | 7.00 | ± 0.60 |  | " in text
    assert people.below([5.0, 4.8, 4.0]) == 4.0
    assert people.below([4.0, 4.8, 4.5]) == 0.0
    assert people.below([4.0, None, 4.5]) is None
    assert "3,000 people" in text


def test_a_batch_of_few_keeps_the_signal_where_noise_is_large():
    """80 steps of 16,000 people of 60,000 in place of 30,000: little signal over noise is lost, the less the more noise."""
    kept = [by["signal over noise"] / by["with half of all"] for by in (people.signal(60_000, e) for e in (1.0, 8.0))]
    assert 1 > kept[0] > 0.97 > kept[1] > 0.9
    assert people.signal(600_000, 1.0)["signal over noise"] > people.signal(60_000, 8.0)["with half of all"]

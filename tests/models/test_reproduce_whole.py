"""`dpformer reproduce whole`: the records, on the embedded data; and what is committed."""

import json
from pathlib import Path

import pytest

from dpformer.data import demo_frame, prepare
from dpformer.errors import DataError, PrivacyError
from dpformer.experiments.reproduce import whole

RESULT = Path(__file__).parents[2] / "docs" / "results" / "whole.json"


@pytest.fixture(scope="module")
def result():
    return whole.measure_sets({"demo": prepare(demo_frame())}, [8.0], 2, "validation", lambda line: None)


def test_a_record_says_all_that_is_needed_to_make_it_again(result):
    assert json.loads(json.dumps(result)) == result
    assert [(r["method"], r["masked"]) for r in result["records"]] == [
        (m, k) for m in whole.METHODS for k in (True, False)
    ]
    for record in result["records"]:
        assert record["command"] == "dpformer reproduce whole --epsilon 8 --seeds 2 --item validation -o docs/results"
        assert record["item"] == "validation"
        assert record["seeds"] == [1, 2]
        assert (record["epsilon"], record["delta"]) == (8.0, 1e-5)
    assert "second to last item" in result["protocols"]["demo"]
    assert whole.show(result).row_count == len(whole.METHODS)


def test_a_record_is_the_mean_of_its_cells(result):
    dataset = prepare(demo_frame())
    found = [whole.cell("DP transitions", dataset, 8.0, seed, "validation").masked for seed in (1, 2)]
    masked = result["records"][0]
    for name in ("ndcg@10", "hit@10"):
        assert masked[name] == pytest.approx(50 * (found[0][name].value + found[1][name].value), abs=1e-3)
    assert masked["std"]["ndcg@10"] > 0


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(PrivacyError, match="--seeds 1"):
        whole.run(seeds=0)
    with pytest.raises(PrivacyError, match="finite"):
        whole.run(epsilon=[float("inf")])
    with pytest.raises(DataError, match="test, validation"):
        whole.run(item="train")


def test_the_committed_records_cover_every_target_on_the_test_item():
    records = json.loads(RESULT.read_text())["records"]
    masked = {(r["dataset"], r["epsilon"]): r for r in records if r["masked"] and r["item"] == "test"}
    assert masked.keys() == whole.TARGETS.keys()
    assert all(len(record["seeds"]) >= 3 for record in masked.values())

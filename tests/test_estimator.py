"""`DPFormer` from frame to frame."""

import subprocess
import sys

import pandas as pd
import polars as pl
import pytest

from dpformer import DPFormer
from dpformer.data import demo_frame
from dpformer.errors import DPFormerError


@pytest.fixture(scope="module")
def fitted():
    return DPFormer("pure", epsilon=8, epochs=3).fit(demo_frame(), title="title")


def test_recommend_for_histories(fitted):
    frame = fitted.recommend(histories=[["book-000", "book-001"], [], ["no such book"]], k=4)
    assert frame.columns == ["history", "rank", "item_id", "title", "score"]
    assert frame.group_by("history").len()["len"].to_list() == [4, 4, 4]
    first = frame.filter(pl.col("history") == 0)
    assert first["rank"].to_list() == [1, 2, 3, 4]
    assert not set(first["item_id"]) & {"book-000", "book-001"}, "seen items are left out"
    assert first["score"].is_sorted(descending=True)
    cold = [frame.filter(pl.col("history") == n)["item_id"].to_list() for n in (1, 2)]
    assert cold[0] == cold[1], "nothing known: the released popularity"
    assert "book-000" in fitted.recommend(histories=[["book-000"]], k=500, seen=True)["item_id"]


def test_recommend_for_users(fitted):
    frame = fitted.recommend(users=["reader-0007", "reader-0001"], k=3)
    assert frame["user_id"].to_list() == ["reader-0007"] * 3 + ["reader-0001"] * 3
    read = set(demo_frame().filter(pl.col("user_id") == "reader-0007")["item_id"])
    assert not set(frame.filter(pl.col("user_id") == "reader-0007")["item_id"]) & read
    with pytest.raises(DPFormerError, match="nobody"):
        fitted.recommend(users=["nobody"])
    with pytest.raises(DPFormerError, match="either"):
        fitted.recommend()


def test_statement_and_evaluation(fitted):
    assert fitted.privacy.epsilon <= 8
    assert not fitted.privacy.insecure
    assert 0 < fitted.evaluate().masked["ndcg@10"].value < 1
    with pytest.raises(DPFormerError, match=r"item is 'test' or 'validation'.*--data DATA"):
        fitted.evaluate(demo_frame())


def test_saved_models_load_elsewhere_without_the_data(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    assert not {"events.jsonl", "metrics.json", "private"} & {p.name for p in (tmp_path / "model").iterdir()}
    code = (
        f"from dpformer import DPFormer; m = DPFormer.load({str(tmp_path / 'model')!r});"
        "print(m.recommend(histories=[['book-000']], k=3)['item_id'].to_list())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(fitted.recommend(histories=[["book-000"]], k=3)["item_id"].to_list())
    loaded = DPFormer.load(tmp_path / "model")
    for refused in (lambda: loaded.recommend(users=["reader-0001"]), loaded.evaluate):
        with pytest.raises(DPFormerError):
            refused()
    with pytest.raises(DPFormerError, match="exists"):
        fitted.save(tmp_path / "model")


def test_a_pandas_frame_and_other_models():
    frame = pd.DataFrame({"user_id": [u for u in range(40) for _ in range(6)], "item_id": list("abcdef") * 40})
    for kind in ("gru", "lstm"):
        model = DPFormer("pure", model=kind, recency=None, epsilon=5, delta=1e-3, epochs=2, d=4).fit(frame)
        assert model.recommend(histories=[["a", "b"]], k=2).height == 2
        assert model.privacy.epsilon <= 5


def test_settings_and_order_are_checked():
    with pytest.raises(DPFormerError, match="learning_rate"):
        DPFormer(lerning_rate=1.0)
    with pytest.raises(DPFormerError, match="epsilon"):
        DPFormer(epsilon=-1)
    with pytest.raises(DPFormerError, match="fit first"):
        DPFormer().recommend(histories=[["a"]])


def test_several_processes_do_not_each_spend_the_budget(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DPFormerError, match="each would spend the whole budget"):
        DPFormer("popularity", epsilon=8).fit(demo_frame(), title="title")

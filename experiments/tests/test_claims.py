"""The table of claims: verdicts follow from figures, and the committed page is what they say."""

import json
from pathlib import Path

import pytest

from dpformer.errors import DPFormerError
from dpformer_experiments.reproduce import claims, common, comparisons, paper
from dpformer_experiments.reproduce.methods import row_name

DOCS = Path(__file__).parents[2] / "docs"


def folder_of(tmp_path: Path, values: dict[str, float]) -> Path:
    rows = [
        {"dataset": "ml-1m", "method": row_name(name, "common recipe"), "epsilon": 8.0, "ndcg@10": value, "seeds": [1]}
        for name, value in values.items()
    ]
    (tmp_path / "results").mkdir(exist_ok=True)
    (tmp_path / "results" / "table-1.json").write_text(json.dumps({"rows": rows}))
    return tmp_path


def test_a_verdict_follows_from_the_figures(tmp_path):
    values = {paper.VANILLA: 5.0, paper.GRU: 6.0, paper.LSTM: 4.0, paper.UNSHARED: 3.0, common.HALVED: 4.0}
    values[paper.DPFORMER] = 5.4
    rows = {row["claim"]: row for row in claims.run(out=folder_of(tmp_path, values))["rows"]}
    assert rows["Sharing the embedding is essential under DP-SGD"]["verdict"].startswith(comparisons.HOLDS)
    recurrent = rows["The Transformer outperforms GRU and LSTM"]
    assert recurrent["verdict"] == f"{comparisons.DOES_NOT} (0 of 1; 5 to come)"
    assert recurrent["measured"] == "ml-1m at 8 (1 seed): Transformer 5.00, GRU 6.00, LSTM 4.00"
    [gain] = [row for name, row in rows.items() if name.startswith("Re-Attention")]
    assert "+8.0 % (reported +9 %)" in gain["measured"]
    assert gain["verdict"].startswith(comparisons.HOLDS)
    assert rows["Large batches with large rates are best"]["verdict"] == comparisons.OPEN
    values[paper.GRU], values[paper.DPFORMER] = 4.5, 5.1
    rows = {row["claim"]: row for row in claims.run(out=folder_of(tmp_path, values))["rows"]}
    assert rows["The Transformer outperforms GRU and LSTM"]["verdict"].startswith(comparisons.HOLDS)
    [gain] = [row for name, row in rows.items() if name.startswith("Re-Attention")]
    assert gain["verdict"] == f"{comparisons.DOES_NOT} (0 of 1; 11 to come)"


def test_heat_maps_are_compared_cell_by_cell(tmp_path):
    figures = {"shared": (3.0, 4.0, 5.0), "not shared": (2.0, 4.5, None)}
    rows = [
        {"setting": setting, "batch_size": 256, "learning_rate": float(rate), "ndcg@10": value}
        for setting, values in figures.items()
        for rate, value in enumerate(values)
    ]
    folder = folder_of(tmp_path, {paper.GRU: 1.0})
    (folder / "results" / "embedding-sharing.json").write_text(json.dumps({"rows": rows}))
    found = {row["claim"]: row for row in claims.run(out=folder)["rows"]}
    row = found["Sharing is better at every batch size and rate"]
    assert row["measured"] == "shared better than not shared in 1 of 2 cells (best 4.00, 4.50)"
    assert row["verdict"] == f"{comparisons.IN_PART} (1 of 2; 48 to come)"
    assert found["DPFormer is better at most batch sizes and rates (Amazon)"]["verdict"] == comparisons.OPEN


@pytest.mark.parametrize(
    ("rise", "wiggle", "verdict"),
    [(0.5, 0.01, comparisons.HOLDS), (0.5, 0.2, comparisons.DOES_NOT), (0.0, 0.01, comparisons.DOES_NOT)],
)
def test_convergence_is_faster_and_smoother_or_not(tmp_path, rise, wiggle, verdict):
    def curve(model: str, rise: float, wiggle: float) -> list[dict[str, object]]:
        about = {"dataset": "ml-1m", "epsilon": 5.0, "model": model, "seeds": 2}
        points = [5 + rise + wiggle * (-1) ** epoch for epoch in range(8)]
        return [{**about, "epoch": n, "ndcg@10 of seeds": [x - 0.05, x + 0.05]} for n, x in enumerate(points)]

    folder = folder_of(tmp_path, {paper.GRU: 1.0})
    rows = curve("Transformer", 0.0, 0.1) + curve("DPFormer", rise, wiggle)
    (folder / "results" / "convergence.json").write_text(json.dumps({"rows": rows}))
    found = {row["claim"]: row for row in claims.run(out=folder)["rows"]}
    row = found["Faster and smoother convergence with Re-Attention"]
    assert row["verdict"].startswith(verdict)
    assert f"mean over all epochs {rise:+.2f} ± 0.07" in row["measured"]


def test_a_page_without_marks_is_refused(tmp_path):
    with pytest.raises(DPFormerError, match="contains no table"):
        claims.run(out=tmp_path)
    figures = claims.run(out=folder_of(tmp_path, {paper.GRU: 1.0}))
    (tmp_path / claims.FILE).write_text("# Paper\n")
    with pytest.raises(DPFormerError, match="lacks the marks"):
        claims.write(figures, tmp_path)
    (tmp_path / claims.FILE).write_text(f"# Paper\n\n{claims.BEGIN}\nold\n{claims.END}\n\nMore.\n")
    claims.write(figures, tmp_path)
    text = (tmp_path / claims.FILE).read_text()
    assert "old" not in text
    assert text.endswith(f"{claims.END}\n\nMore.\n")


def test_the_committed_claims_are_what_the_figures_say():
    assert claims.page(claims.run(out=DOCS)).grid() in (DOCS / claims.FILE).read_text()

"""`dpformer reproduce error-table` and `attention`, on small settings."""

import json

from dpformer_experiments.reproduce import attention, error_table
from dpformer_experiments.reproduce.page import save_figure


def test_the_papers_activation_table():
    rows = error_table.run()["rows"]
    json.dumps(rows)
    for row in rows:
        assert float(f"{row['analytic']:.2g}") == float(f"{row['paper']:.2g}")
        if row["activation"] == "ReLU":
            assert abs(row["sampled"]["1000000"] / row["analytic"] - 1) < 0.02
    assert len(error_table.page({"rows": rows}).rows) == 6


def test_attention_experiment(tmp_path):
    """A small version: noise draws attention to the tail with post-norm, less so when corrected; the figure is drawn."""
    figures = attention.run(draws=3, steps=40)
    json.dumps(figures)
    bias = figures["one_query"]
    assert bias["corrected"] < bias["plain"] / 3 < bias["literal"] / 3
    tail = {name: lift[2] for name, lift in figures["transformer"]["post"]["lift"].items()}
    assert tail["noisy"] > tail["clean"]
    assert tail["corrected"] < tail["noisy"]
    head, torso, rare = figures["transformer"]["post"]["variance"]
    assert head < torso < rare
    save_figure(attention.draw(figures), tmp_path / "attention")
    assert (tmp_path / "attention.png").stat().st_size > 10_000
    assert len(attention.page(figures).rows) == 8

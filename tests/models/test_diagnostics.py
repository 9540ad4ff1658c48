import json

import torch

from dpformer.experiments.reproduce import attention, error_table
from dpformer.experiments.reproduce.page import save_figure
from dpformer.models.diagnostics import attention_lift, popularity_groups


def test_groups_share_occurrences():
    frequencies = torch.cat([torch.zeros(1), 1 / torch.arange(1, 101)])
    groups = popularity_groups(frequencies)
    assert groups[0] == -1
    assert (groups[1:].diff() >= 0).all(), "less popular items are never in a more popular group"
    shares = torch.stack([frequencies[groups == g].sum() for g in range(3)]) / frequencies.sum()
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.07)


def test_uniform_attention_has_a_lift_of_one_for_every_group():
    s = torch.randint(1, 30, (5, 8))
    s[0, 5:] = 0
    uniform = (torch.tril(torch.ones(8, 8)) / torch.arange(1, 9)[:, None]).expand(5, 2, 8, 8)
    lift = attention_lift(uniform, s, popularity_groups(torch.rand(30)))
    torch.testing.assert_close(lift, torch.ones(3))


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

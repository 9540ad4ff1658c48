"""Noise on a trained embedding: what each kind of attention is, and the table."""

import json

import pytest
import torch

from dpformer.data import held_out, load
from dpformer.models import ReAttention, Transformer, TransformerSpec
from dpformer_experiments import noisy_attention
from dpformer_experiments.noisy_attention import (
    AS_IT_IS,
    CLEAN,
    KINDS,
    SCALES,
    attention_of,
    keys_times,
    known_variances,
)
from dpformer_experiments.reproduce import attention_limit
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from small_table import TINY


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_clean_scores_of_the_same_embedding_change_nothing_and_of_another_do(norm):
    torch.manual_seed(0)
    spec = TransformerSpec(items=30, d=8, blocks=2, heads=2, max_length=6, norm=norm, reattention=ReAttention())
    network, rows = Transformer(spec).eval(), torch.randint(1, 31, (4, 6))
    with torch.no_grad():
        network.embedding.weight.mul_(20)
        usual, clean = network.states(rows), network.embedding.weight.clone()
        with attention_of(network, clean):
            assert torch.allclose(network.states(rows), usual, atol=1e-5)
        network.embedding.weight.add_(torch.randn(clean.shape))
        noisy = network.states(rows)
        with attention_of(network, clean):
            assert not torch.allclose(network.states(rows), noisy, atol=1e-3)
        assert torch.equal(network.states(rows), noisy)


@pytest.mark.parametrize("recency", [None, 1.0])
def test_factors_of_keys_multiply_scores(recency):
    """Keys times 1 change nothing; times 0, each query sees all keys up to it alike, but for the lag."""
    torch.manual_seed(0)
    spec = TransformerSpec(items=30, d=8, blocks=2, heads=2, max_length=6, recency=recency)
    network, rows = Transformer(spec).eval(), torch.randint(1, 31, (4, 6))
    with torch.no_grad():
        network.embedding.weight.mul_(20)
        usual = network.states(rows)
        with keys_times(network, torch.ones(31)):
            assert torch.allclose(network.states(rows), usual, atol=1e-5)
        with keys_times(network, torch.zeros(31)):
            even = network.states(rows)
        assert not torch.allclose(even, usual, atol=1e-3)
        for block in network.blocks:
            block.qkv.weight[8:16] = 0.0
            block.qkv.bias[8:16] = 0.0
        assert torch.allclose(network.states(rows), even, atol=1e-5)


def test_known_variances_correct_attention_and_only_while_they_are_known():
    torch.manual_seed(0)
    network = Transformer(TransformerSpec(items=30, d=8, blocks=1, max_length=6, reattention=ReAttention())).eval()
    rows = torch.randint(1, 31, (4, 6))
    before = network.states(rows)
    with known_variances(network, torch.linspace(0, 1, 31)):
        assert not torch.equal(network.states(rows), before)
    assert torch.equal(network.states(rows), before)


def test_noise_is_larger_on_rare_items_and_its_mean_over_events_is_one(demo):
    dataset = load(demo["demo"])
    held = held_out(dataset.sequences, "validation")
    variances = noisy_attention.row_variances(held, len(dataset.catalogue))
    items = torch.from_numpy(held.histories.items).long()
    assert float(variances[items].mean()) == pytest.approx(1, abs=1e-4)
    counts = torch.bincount(items, minlength=len(variances))
    assert variances[counts[1:].argmin() + 1] > variances[counts[1:].argmax() + 1] > 0 == variances[0]


def test_a_cell_has_a_figure_for_each_draw_and_the_table_shows_them(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(noisy_attention, "DRAWS", 2)
    monkeypatch.setattr(noisy_attention.measure, "__defaults__", (2, 100))
    options = {**TINY, "reattention": "logits"}
    cell = Cell(
        *("demo", "noise on a trained embedding, post-norm", float("inf"), 1),
        preset="paper",
        options=options,
        search=True,
        noisy=True,
    )
    [outcome] = run_cells([cell], demo, Running(tmp_path, workers=1))
    assert outcome.record is not None
    json.dumps(outcome.record)
    for row in outcome.record["noisy"]["noisy"]:
        assert [len(row[kind]) for kind in KINDS] == [2] * len(KINDS)
    figures = attention_limit.measure([outcome])
    first, row = figures["rows"][0], outcome.record["noisy"]["noisy"][0]
    assert first["clean, gains"] == [round(row[CLEAN][k] - row[AS_IT_IS][k], 4) for k in (0, 1)]
    assert "±" in attention_limit.page(figures).rows[0][-1]
    private = Cell("demo", "learned scores, post-norm", 8.0, 1, preset="paper", options=TINY, search=True, noisy=True)
    [scaled] = run_cells([private], demo, Running(tmp_path, workers=1))
    assert scaled.record is not None
    [of_scores] = attention_limit.measure([scaled])["learned scores"]
    assert list(of_scores["by factor"]) == [f"{scale:g}" for scale in SCALES]
    waiting = attention_limit.measure([CellResult(cell, tmp_path) for cell in attention_limit.cells()])
    assert {row[-1] for row in attention_limit.page(waiting).rows} == {"queued"}
    assert len(waiting["learned scores"]) == len(attention_limit.PRIVATE) * attention_limit.PRIVATE_SEEDS

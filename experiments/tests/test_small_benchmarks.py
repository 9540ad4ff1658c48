"""The benchmarks of preparing, noise and processes, on workloads that take a moment."""

import numpy as np
import pytest

from dpformer.fit.gradient_sum import FIXED_COST
from dpformer.privacy import Sample
from dpformer.training.groups import Groups
from dpformer_experiments.bench import grouping, latency, noise, prepare, ranks
from dpformer_experiments.bench.workloads import uniform


def test_the_benchmark_measures_what_it_says():
    figures = prepare.run(quick=True)
    for row in figures.values():
        assert row["users"] == 20_000
        assert row["events_per_second"] == pytest.approx(row["events"] / row["seconds"])
        assert 50 < row["peak_mb"] < 2000


def test_the_noise_benchmark_measures_noise_and_whole_answers(monkeypatch):
    monkeypatch.setattr(noise, "SIZES", (20_000,))
    monkeypatch.setattr(noise, "GOALS", {20_000: {"noise": 1e9, "answer": 1e9}})
    [rows] = noise.run(quick=True).values()
    assert set(rows) == {"torch", "noise", "answer"}
    assert rows["answer"]["milliseconds"] > rows["noise"]["milliseconds"] > 0
    assert rows["torch"]["time_relative_to_torch"] == 1
    noise.show({"20000": rows})


def test_the_benchmark_of_lists_measures_all_models(monkeypatch):
    monkeypatch.setattr(latency, "ITEMS", (2_000, 3_000, 10**9))
    figures = latency.run(quick=True)
    assert set(figures) == {"2000", "3000"}
    for rows in figures.values():
        assert set(rows) == {"vocabulary", "vocabulary, filtered", "whole", "whole, filtered"}
        assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in rows.values())
    latency.show(figures)


def test_the_benchmark_of_groups_counts_padding_and_micro_batches():
    """One step of a new model, cut by hand: users of one length are padded to the width of their class at the most."""
    same = grouping.measure(uniform(300, 9, 30, 10), "pure", 1)
    assert same["batch"] == 150
    assert same["groups"] == 2
    assert same["cuts"][grouping.TODAY]["micro_batches"] == 2
    assert same["cuts"][grouping.WHOLE]["micro_batches"] == 1
    for cut in same["cuts"].values():
        # 150 people at the most in a group: no class is narrower than 27, and 10 items are padded to that.
        assert cut["positions_per_token"] == FIXED_COST // 150 / 10
        assert cut["seconds"] > 0
    grouping.show({"small": same})


def test_groups_do_not_change_the_sum():
    workload = uniform(300, 7, 30, 8)
    trainer = grouping.make_trainer(workload, "pure")
    drawn = np.arange(0, 300, 2)
    by_group = trainer.query.sum(workload.sequences, Sample(drawn, bytes(32)), 2.0**-26)
    whole = grouping.with_groups(trainer.query, Groups(300, 300)).sum(
        workload.sequences, Sample(drawn, bytes(32)), 2.0**-26
    )
    for name, value in by_group.items():
        # Float32 sums of other people: off by rounding, relative to 150 people of norm 1.
        assert np.abs(value - whole[name]).max() <= 150 * 2.0**-21 * 2**26, name


@pytest.mark.slow
def test_the_benchmark_of_processes(monkeypatch):
    monkeypatch.setattr(ranks, "find", lambda name: uniform(40, 6, 30, 8))
    monkeypatch.setattr(ranks, "CONTENDERS", {name: ranks.CONTENDERS[name] for name in ("1 process", "2 processes")})
    found = ranks._measure("small", users=20, steps=2, rounds=1, say=lambda line: None)
    one, two = (found["contenders"][name] for name in ("1 process", "2 processes"))
    assert one["speed_relative_to_1"] == one["peak_relative_to_1"] == 1
    assert two["speed_ratios"] == [one["seconds"] / two["seconds"]]
    assert (one["bytes_a_step"], two["bytes_a_step"] % 8) == (0, 0)
    assert two["bytes_a_step"] > 0
    assert 0 <= two["waiting"] <= 2 * two["seconds"]
    assert "2 processes" in str(ranks.show({"small": found}).columns[1]._cells)

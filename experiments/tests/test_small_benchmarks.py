"""The benchmarks of preparing, noise and processes, on workloads that take a moment."""

import pytest

from dpformer_experiments.bench import noise, prepare, ranks
from dpformer_experiments.bench.workloads import uniform


def test_the_benchmark_measures_what_it_says():
    figures = prepare.run(quick=True)
    for row in figures.values():
        assert row["users"] == 20_000
        assert row["events_per_second"] == pytest.approx(row["events"] / row["seconds"])
        assert 50 < row["peak_mb"] < 2000


def test_the_noise_benchmark_runs():
    figures = noise.run(quick=True)
    assert figures["modes"]["crypto"]["milliseconds"] > figures["modes"]["system"]["milliseconds"] > 0
    noise.show(figures)


@pytest.mark.slow
def test_the_benchmark_of_processes(monkeypatch):
    monkeypatch.setattr(ranks, "find", lambda name: uniform(40, 6, 30, 8))
    monkeypatch.setattr(ranks, "CONTENDERS", {name: ranks.CONTENDERS[name] for name in ("1 process", "2 processes")})
    found = ranks._measure("small", users=20, steps=2, rounds=1, say=lambda line: None)
    one, two = (found["contenders"][name] for name in ("1 process", "2 processes"))
    assert one["speed_relative_to_1"] == one["peak_relative_to_1"] == 1
    assert two["speed_ratios"] == [one["seconds"] / two["seconds"]]
    assert (one["bytes_a_step"], two["bytes_a_step"] % 4) == (0, 0)
    assert two["bytes_a_step"] > 0
    assert 0 <= two["waiting"] <= 2 * two["seconds"]
    assert "2 processes" in str(ranks.show({"small": found}).columns[1]._cells)

"""A batch dealt to processes, and the benchmark of processes on a workload of a moment."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.data import deal
from dpformer.experiments.bench import ranks
from dpformer.experiments.bench.workloads import uniform


@given(st.lists(st.integers(2, 201)), st.integers(1, 9))
def test_everybody_is_dealt_once_and_tokens_are_balanced(lengths, parts):
    users = np.flatnonzero(np.ones(len(lengths))) * 3 + 1
    dealt = deal(users, np.array(lengths, dtype=np.int64), parts)
    assert len(dealt) == parts
    assert sorted(np.concatenate(dealt).tolist()) == users.tolist()
    tokens = [sum(lengths[(user - 1) // 3] for user in part) for part in dealt]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 2


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

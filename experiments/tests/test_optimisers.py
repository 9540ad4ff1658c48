"""Each optimiser against its formula in float64, written again here; a stopped run goes on; the table has gains of one seed."""

import numpy as np
import pytest
import torch
from torch import nn

from dpformer.fit.adam import momentum
from dpformer_experiments.optimisers import OPTIMISERS, OURS, PLAIN, Disk, Doppler
from dpformer_experiments.reproduce import optimisers
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.runner import CellResult, Running, Watch, run_cells
from dpformer_experiments.reproduce.runs import read_lines
from small_table import TINY
from test_queue import RUNS

STEPS, DECAY, S = 10, 0.01, 0.3
START = np.random.default_rng(0).normal(size=(4, 3))
# The first row is below the noise, the others are above it.
GRADIENTS = np.random.default_rng(1).normal(size=(STEPS, 4, 3)) * [[0.1], [1], [1], [1]]
RATES = [0.1 / (t + 1) for t in range(STEPS)]


def made(name, start=START, steps=STEPS):
    p = nn.Parameter(torch.tensor(start))
    return p, OPTIMISERS[name]([p], DECAY, S, steps)


def trained(name, gradients=GRADIENTS):
    """The weights after each step."""
    p, optimiser = made(name)
    weights = []
    for g, rate in zip(gradients, RATES, strict=True):
        p.grad = torch.tensor(g)
        optimiser.step(rate)
        weights.append(p.detach().numpy().copy())
    return np.array(weights)


def adam(gradients, rates, beta1, divisor=np.sqrt, square=np.square, x=START):
    """Adam by its sums: m and v are weighted means of all gradients so far. Weights after each step."""
    weights, seen = [], []
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        seen.append((g(x) if callable(g) else g) + DECAY * x)
        m, v = (
            np.average(values, axis=0, weights=b ** np.arange(t)[::-1])
            for b, values in ((beta1, seen), (0.999, [square(each) for each in seen]))
        )
        x = x - rate * m / divisor(v)
        weights.append(x)
    return np.array(weights)


def row(g):
    return np.square(g).mean(1, keepdims=True) + 0 * g


def floor(v):
    return np.maximum(np.sqrt(v), S)


OWN = momentum(STEPS)
LAST = STEPS // 5
FILTERED = [np.average(GRADIENTS[: t + 1], axis=0, weights=0.9 ** np.arange(t + 1)[::-1]) for t in range(STEPS)]
FORMULAS = {
    OURS: lambda: adam(GRADIENTS, RATES, OWN, floor, row),
    PLAIN: lambda: adam(GRADIENTS, RATES, 0.9),
    "ours without the floor": lambda: adam(GRADIENTS, RATES, OWN, square=row),
    "ours with beta1 .9": lambda: adam(GRADIENTS, RATES, 0.9, floor, row),
    "ours, second moments per coordinate": lambda: adam(GRADIENTS, RATES, OWN, floor),
    "DP-AdamBC": lambda: adam(GRADIENTS, RATES, 0.9, lambda v: np.sqrt(np.maximum(v - S**2, S**2 / 10))),
    "DOPPLER": lambda: adam(FILTERED, RATES, 0.9),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_steps_are_those_of_the_formula(name):
    np.testing.assert_allclose(trained(name), FORMULAS[name](), rtol=1e-6, atol=1e-6)  # the 1e-8 beside the root


def test_no_two_of_them_are_the_same():
    last = {name: trained(name)[-1] for name in OPTIMISERS}
    for name, weights in last.items():
        assert [other for other, theirs in last.items() if np.allclose(weights, theirs)] == [name]


def test_steps_of_sgd_add_up_gradients_that_fade():
    x, weights = START, []
    seen = []
    for t in range(STEPS):
        seen.append(GRADIENTS[t] + DECAY * x)
        x = x - RATES[t] / S * sum(0.9 ** (t - k) * g for k, g in enumerate(seen))
        weights.append(x)
    np.testing.assert_allclose(trained("SGD with momentum"), weights, rtol=1e-12)


def test_the_last_fifth_is_made_again_with_its_mean_gradient():
    mean = GRADIENTS[-LAST:].mean(0)
    expected = adam([*GRADIENTS, *[mean] * LAST], [*RATES, *RATES[-LAST:]], OWN, floor, row)
    found = trained("ours, last steps repeated")
    np.testing.assert_allclose(found[:-1], expected[: STEPS - 1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[-1], expected[-1], rtol=1e-6, atol=1e-6)


def test_disk_asks_ahead_and_ends_at_its_weights():
    """A loss x A x / 2, so that gradients depend on where they are asked for: x follows the filter of gradients ahead."""
    A, k = np.diag([1.0, 3.0, 0.2, 2.0]), 0.7
    p, disk = made("DiSK")
    for rate in RATES:
        p.grad = torch.tensor(A @ p.detach().numpy())
        disk.step(rate)
    x = before = START
    f = m = v = 0.0
    for t, rate in enumerate(RATES, 1):
        g = A @ (x + (1 - k) / k * (x - before))
        f = g if t == 1 else (1 - k) * f + k * g
        given = f + DECAY * x
        m, v = 0.9 * m + 0.1 * given, 0.999 * v + 0.001 * given**2
        x, before = x - rate * m / (1 - 0.9**t) / np.sqrt(v / (1 - 0.999**t)), x
    np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("DOPPLER", Doppler), ("DiSK", Disk)])
def test_a_filter_of_gain_1_is_plain_adam(name, kind, monkeypatch):
    assert not np.allclose(trained(name), trained(PLAIN))
    monkeypatch.setattr(kind, "gain", 1.0)
    np.testing.assert_allclose(trained(name), trained(PLAIN), rtol=1e-12)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_each_goes_on_from_its_state(name):
    p, first = made(name)
    for g, rate in zip(GRADIENTS[:9], RATES[:9], strict=True):
        p.grad = torch.tensor(g)
        first.step(rate)
    q, second = made(name, p.detach().numpy())
    second.restore({key: value.clone() for key, value in first.state().items()})
    q.grad = torch.tensor(GRADIENTS[9])
    second.step(RATES[9])
    np.testing.assert_array_equal(q.detach().numpy(), trained(name)[-1])


SMALL = {**TINY, "reattention": "off", "learning_rate": 0.05, "dropout": 0.0}


def weights_of(outcome):
    return (outcome.folder / "run" / "model.safetensors").read_bytes()


def test_a_cell_trains_with_its_optimiser_and_goes_on_with_it_after_a_stop(demo, tmp_path):
    def cell(name):
        return Cell("demo", str(name), 8.0, 1, preset="paper", options=SMALL, paired=True, optimiser=name)

    names = (None, OURS, PLAIN, "DiSK")
    whole = run_cells([cell(name) for name in names], demo, Running(tmp_path / "whole", workers=1))
    library, ours, plain, disk = map(weights_of, whole)
    assert library == ours
    assert len({library, plain, disk}) == 3
    assert "optimiser" not in cell(None).settings()
    assert cell("DiSK").settings()["optimiser"] == "DiSK"
    assert cell("DiSK").command("optimisers").startswith("dpformer reproduce optimisers")

    class Stop(Watch):
        seen = 0

        def step(self, cell, step, steps):
            self.seen = step

    watch = Stop()
    how = Running(tmp_path / "stopped", workers=1, watch=watch, stopped=lambda: watch.seen == 2)
    [stopped] = run_cells([cell("DiSK")], demo, how)
    assert (stopped.record, watch.seen) == (None, 2)
    [resumed] = run_cells([cell("DiSK")], demo, Running(tmp_path / "stopped", workers=1))
    assert weights_of(resumed) == disk


def test_gains_are_over_the_run_of_the_same_seed(tmp_path):
    def record(value):
        both = {"masked": {metric: {"value": value} for metric in ("ndcg@10", "hit@10")}}
        return {"test": both, "validation": both, "settings": {}, "core_seconds": 1.0, "dpformer": "0"}

    compared = [cell for cell in optimisers.cells() if not cell.search and cell.dataset == "ml-1m"]
    base, outcomes = {2: 0.10, 3: 0.12}, []
    for cell in compared:
        gain = {None: 0.0, PLAIN: -0.01, "DiSK": 0.005 * cell.seed}.get(cell.optimiser)
        finished = gain is not None and cell.seed in base and (cell.optimiser, cell.seed) != (PLAIN, 3)
        outcomes.append(CellResult(cell, tmp_path, record(base[cell.seed] + gain) if finished else None))
    figures = optimisers.measure(outcomes)
    rows = {row["optimiser"]: row for row in figures["rows"] if row["dataset"] == "ml-1m"}
    assert rows["DiSK"]["seeds"] == [2, 3]
    assert rows["DiSK"][f"test gains over {OURS}"] == pytest.approx([1.0, 1.5])
    assert rows["DiSK"][f"test gains over {PLAIN}"] == pytest.approx([2.0])  # seed 3 has no run of plain Adam
    assert rows["DP-AdamBC"]["test"] is None
    lines = {line[:2]: line[2:] for line in optimisers.page(figures).rows}
    assert lines["DiSK", "test"][0] == "12.25 (+1.25)"
    assert "+1.250 ± 0.250 (2 of 2)" in lines["DiSK", "test"]
    assert set(lines["DP-AdamBC", "test"]) == {"queued"}
    assert "queued" in optimisers.page(figures).markdown()


def test_chosen_rates_are_the_best_of_the_finished_searches():
    lines = {line["key"]: line for line in read_lines(RUNS) if "key" in line}
    prints = {line["data"] for line in lines.values() if line["dataset"] == optimisers.SEARCH_SET and "data" in line}
    for name, chosen in optimisers.CHOSEN.items():
        cells = [cell for cell in optimisers.search() if (cell.optimiser or OURS) == name]
        found = [
            (cell.options["learning_rate"], lines[key])
            for cell in cells
            for key in map(cell.key, prints)
            if key in lines
        ]
        values = {rate: line["validation"]["masked"]["ndcg@10"]["value"] for rate, line in found}
        if len(values) == len(cells):
            assert chosen == max(values, key=lambda rate: values[rate]), name
        assert not any("test" in line for _, line in found)

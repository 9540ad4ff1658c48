"""The training benchmark: honest comparisons, and everything that a report promises, on workloads of a moment."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpformer_experiments.bench import breakdown, compare, goals, growth, report, training, workloads
from dpformer_experiments.bench.child import call, run_child
from dpformer_experiments.bench.contenders import Naive, Own, Plain, PlainPadded, build
from dpformer_experiments.bench.workloads import SHAPES, Shape

TINY = Shape(L=12, users=200, items=40, log_mean=1.8, log_std=0.6, shortest=1, longest=30, shift=5, power=1.2)
NAMED = {"ml-1m": 6_040, "games": 31_013}


@pytest.fixture
def tiny():
    return workloads.generate("tiny", TINY)


@pytest.fixture
def path(tiny, tmp_path):
    tiny.save(tmp_path / "tiny.npz")
    return str(tmp_path / "tiny.npz")


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def step_without_noise(own, monkeypatch):
    """The sum of one step of the project's loop by parameter, as its Curator answers without noise; and the turn."""
    seen = []
    monkeypatch.setattr(own.curator, "_noise", lambda key, shape, std: np.zeros(shape, dtype=np.int64))
    monkeypatch.setattr(own.trainer, "update", seen.append)
    turn = own.step()
    names = [name for name, _ in own.trainer.model.named_parameters()]
    return {name: g * own.trainer.plan.batch_size for name, g in zip(names, seen[0], strict=True)}, turn


def test_plain_and_private_sum_the_same_gradients(tiny, monkeypatch):
    """With every clipping factor at 1, noise off and the update left out, both have done the same work for the same users."""
    own = Own(tiny, 50, private=True)
    ones = torch.ones(len(tiny.sequences), dtype=torch.float64)
    monkeypatch.setattr(
        type(own.trainer.clipping.clip), "factors", lambda self, squared, bound, eps: ones[: len(squared)]
    )
    ours, first = step_without_noise(own, monkeypatch)
    for contender in (Plain(tiny, 50, build(tiny)), PlainPadded(tiny, 50, build(tiny), rows=7)):
        monkeypatch.setattr(contender, "finish", lambda: None)
        turn = contender.step()
        np.testing.assert_array_equal(turn.users, first.users)
        for name, gradient in gradients(contender.model).items():
            torch.testing.assert_close(gradient, ours[name], rtol=1e-4, atol=1e-5)


def test_ordinary_training_has_few_micro_batches_of_the_token_budget(tiny, monkeypatch):
    contender = Plain(tiny, 50, build(tiny))
    monkeypatch.setattr(contender, "how", replace(contender.how, token_budget=100))
    users = np.arange(len(tiny.sequences))
    lengths = np.minimum(tiny.sequences.lengths, tiny.L + 1)
    pieces = contender.pieces(users)
    np.testing.assert_array_equal(np.sort(np.concatenate(pieces)), users)
    assert all(len(piece) * lengths[piece].max() <= 100 for piece in pieces)
    assert len(pieces) <= lengths.sum() / 100 * 1.5


def test_the_naive_loop_clips_as_the_trainer_does(tiny, monkeypatch):
    own, naive = Own(tiny, 30, private=True), Naive(tiny, 30, build(tiny))
    monkeypatch.setattr(naive, "finish", lambda: None)
    ours, _ = step_without_noise(own, monkeypatch)
    naive.step()
    for name, gradient in gradients(naive.model).items():
        torch.testing.assert_close(gradient, ours[name], rtol=1e-3, atol=1e-4)


def test_the_private_contender_is_charged_for_each_step(tiny):
    private, without = Own(tiny, 30, private=True), Own(tiny, 30, private=False)
    for _ in range(3):
        np.testing.assert_array_equal(private.step().users, without.step().users)
    assert private.curator.ledger.account().steps_charged == 3
    assert without.curator.ledger is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in compare.MAKERS if name in compare.present()])
def test_every_contender_steps_and_learns(name, tiny):
    contender = compare.MAKERS[name](tiny, 50, None, 16)
    model = contender.trainer.model if isinstance(contender, Own) else contender.model
    before = [p.detach().clone() for p in model.parameters()]
    turn = contender.step()
    assert turn.seconds > 0
    assert 20 < len(turn.users) < 80
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.isfinite(new).all()
        assert not torch.equal(old, new)


def test_a_part_of_the_batch_stands_for_all_of_it(tiny, monkeypatch):
    """Time is scaled by tokens: with a clock that counts tokens, a part reports what the whole does."""
    seen = []
    for take in (None, 10):
        contender = Naive(tiny, 50, build(tiny), take)
        clock = [0.0]
        monkeypatch.setattr("time.perf_counter", lambda clock=clock: clock[0])
        monkeypatch.setattr(contender, "finish", lambda: None)

        def add(tokens, clock=clock):
            clock[0] += tokens.shape[1] - 1

        monkeypatch.setattr(contender, "add", add)
        turn = contender.step()
        seen.append(turn.seconds)
        assert seen[-1] == pytest.approx(tiny.tokens(turn.users))


def test_exponents_are_recovered():
    x = np.array([10.0, 100.0, 1000.0])
    assert growth.exponent(x, 7 * x**1.5) == pytest.approx(1.5)
    assert growth.exponent(x, np.full(3, 4.0)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", list(SHAPES))
def test_generated_workloads_have_the_stated_shape(name):
    shape = SHAPES[name]
    made = workloads.generate(name, shape)
    lengths = made.sequences.lengths
    assert len(made.sequences) == shape.users == NAMED[name]
    assert lengths.min() >= shape.shortest
    assert lengths.max() <= shape.longest
    assert np.log(lengths).mean() == pytest.approx(shape.log_mean, abs=0.05)
    assert np.log(lengths).std() == pytest.approx(shape.log_std, abs=0.08)
    counts = np.sort(np.bincount(made.sequences.items, minlength=shape.items + 1)[1:])[::-1] / lengths.sum()
    assert made.sequences.items.min() >= 1
    assert made.sequences.items.max() <= shape.items
    # The share of the most frequent tenth of the items: 42 % of ML-1M's events, 54 % of Games'.
    assert counts[: shape.items // 10].sum() == pytest.approx({"ml-1m": 0.42, "games": 0.54}[name], abs=0.04)


def test_generated_tokens_are_near_the_real_ones(ml_1m, monkeypatch):
    monkeypatch.setenv("DPFORMER_ML_1M", str(ml_1m))
    real, made = workloads.find("ml-1m"), workloads.generate("ml-1m", SHAPES["ml-1m"])
    assert real.source != made.source
    assert made.tokens() == pytest.approx(real.tokens(), rel=0.05)


def test_a_workload_survives_the_way_to_another_process(tiny, path):
    again = workloads.load(path)
    np.testing.assert_array_equal(again.sequences.items, tiny.sequences.items)
    assert again.describe() == tiny.describe()
    larger = workloads.enlarge(tiny, 500)
    assert len(larger.sequences) == 500
    np.testing.assert_array_equal(larger.sequences[0], tiny.sequences[0])


def test_the_clock_gives_each_part_its_own_time(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: next(now))
    clock = breakdown.Clock()
    with clock.part("outer"), clock.part("inner"):
        pass
    assert dict(clock.seconds) == {"inner": 2.0, "outer": 8.0}


def test_the_split_adds_up_and_leaves_the_product_as_it_was(path):
    before = [getattr(owner, name) for owner, name, _ in breakdown.PLACES]
    found = breakdown.measure(path, batch=50, steps=2)
    assert [getattr(owner, name) for owner, name, _ in breakdown.PLACES] == before
    assert sum(found["shares"].values()) == pytest.approx(1, abs=0.2)  # of medians
    always = (
        breakdown.HEAD,
        breakdown.NORM_SUM,
        breakdown.BLOCKS,
        breakdown.NORMS,
        breakdown.COLLATION,
        breakdown.GRID,
    )
    for part in (*always, breakdown.NOISE, breakdown.HASH, breakdown.LEDGER, breakdown.OPTIMISER):
        assert found["shares"][part] > 0, part
    assert found["head_gemm_efficiency"]["median"] > 0


@pytest.fixture(scope="module")
def figures():
    """A whole run on tiny workloads, all in this process: starting dozens of others takes longer than their work."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (training, growth):
            patched.setattr(module, "run_child", lambda target, variables=None, **arguments: call(target, **arguments))
        # In one process the peak does not fall again, so a line through two of them would be flat.
        patched.setattr(
            training,
            "_what_fits",
            lambda path, sizes: {"opacus padded": {"users": 9, "mb_per_user": 1.0, "base_mb": 5.0}},
        )
        patched.setattr(training, "MILLION", 500)
        sizes = replace(training.QUICK, batch=40, rounds=1, take=8, few=2, million_batch=8, every_contender=True)
        sizes = replace(sizes, catalogues=(20, 40), lengths=(3, 6))
        patched.setattr(torch, "set_num_threads", lambda n: None)  # it would stay, and tests share their cores
        found = {key: workloads.generate(key, TINY) for key in SHAPES}
        patched.setattr(training, "BREAKDOWN_BATCH", 40)
        return training.measure(found, sizes, lambda line: None) | {"quick": True}


def test_a_child_gets_the_variables_that_make_its_memory_stay():
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    assert run_child("test_bench:variables", {**compare.KEPT, "PYTHONPATH": path})["seen"] == compare.KEPT
    assert run_child("test_bench:variables", {"PYTHONPATH": path})["seen"] != compare.KEPT


def variables():
    return {"seen": {name: os.environ.get(name) for name in compare.KEPT}}


@pytest.mark.filterwarnings("ignore")
def test_the_report_has_every_ratio_and_goal(figures, tmp_path):
    figures = json.loads(json.dumps(figures))
    assert set(figures["ratios"]) == {
        "private_over_plain",
        "private_over_own_nonprivate",
        "private_over_opacus_hooks",
        "private_over_opacus_padded",
        "head_gemm_efficiency",
        "memory_over_plain",
        "memory_over_plain_4096",
        "memory_flatness",
        "million_items_peak_gb",
        "reattention_over_vanilla",
        "noise_optimizer_share",
    }
    opacus = "opacus hooks" in compare.present()
    for name, by_workload in figures["ratios"].items():
        assert set(by_workload) == ({"generated"} if name == "million_items_peak_gb" else set(SHAPES)), name
        for figure in by_workload.values():
            if opacus or "opacus" not in name:
                assert math.isfinite(figure), name
                assert figure > 0, name
    assert all(goal["met"] in (True, False) for goal in figures["goals"] if opacus or "opacus" not in goal["ratio"])
    for curve in figures["growth"].values():
        assert all(map(math.isfinite, curve["exponents"].values()))
    page = report.markdown(figures)
    for name in figures["ratios"]:
        assert name in page
    report.plot(figures, tmp_path)
    for plot in (report.MEMORY_PLOT, report.SPEED_PLOT):
        assert plot in page
        assert (tmp_path / plot).read_text().startswith("<?xml")
    report.show(figures)


def test_goals_are_judged_by_their_sign(figures):
    ratios = {name: dict(by) for name, by in figures["ratios"].items()}
    ratios["private_over_plain"]["ml-1m"], ratios["memory_flatness"]["ml-1m"] = 1.6, 1.11
    ratios["private_over_opacus_hooks"]["ml-1m"] = None
    met = {(goal["ratio"], goal["workload"]): goal["met"] for goal in goals.judge(ratios)}
    assert met["private_over_plain", "ml-1m"] is True
    assert met["memory_flatness", "ml-1m"] is False
    assert met["private_over_opacus_hooks", "ml-1m"] is None

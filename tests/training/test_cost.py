"""The cost model: its arithmetic against what a model really has, its fit against planted coefficients, its trends."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.experiments.bench import cost as bench
from dpformer.models.transformer import Transformer
from dpformer.training.cost import COMPUTE, MEMORY, Coefficients, Layout, Step, coefficients, fit, known, predict, work
from dpformer.training.devices import A100, on_paper

STEP = Step(tokens=4096, length=32, items=5000, dim=64, blocks=2, feed_forward=64)
PLANTED = Coefficients(
    **{
        "head_flop": 3e-11,
        "logit": 1e-9,
        "block_flop": 7e-11,
        "token": 2e-6,
        "user": 3e-5,
        "micro_batch": 4e-3,
        "parameter": 5e-9,
    },
    **{"noise": 1e-8, "wire_byte": 6e-10, "message": 1e-4, "together": 1e-2, "split": 3e-3, "busy": 0.1},
    **{"memory_base": 3e8, "memory_parameter": 28.0, "memory_state": 60.0, "memory_token": 90.0, "memory_logit": 5.0},
)
SHAPES = [step for _, step in bench.SHAPES]


def test_the_parameters_are_those_of_the_model():
    model = Transformer(STEP.items, 32, d=64, blocks=2, feed_forward=64)
    assert STEP.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)


def test_the_operations_are_those_that_torch_counts():
    """torch counts the products in an ordinary step: two operations forward and four backward for each of them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = Transformer(500, 64, d=64, blocks=2, feed_forward=64)
    tokens = torch.randint(1, 501, (8, 65))
    with FlopCounterMode(display=False) as counter:
        hidden = model(tokens[:, :-1])
        logits = hidden @ model.table.T
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    step = Step(8 * 64, 64, 500, 64, 2, 64)
    assert step.flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_fit_recovers_planted_coefficients():
    rows = [work(step, Layout()) for step in SHAPES]
    costs = [predict(step, Layout(), PLANTED) for step in SHAPES]
    times = [cost.compute_seconds + cost.parameter_seconds for cost in costs]
    for names, values in (((*COMPUTE, "parameter"), times), (MEMORY, [cost.memory_bytes for cost in costs])):
        for name, value in fit(rows, values, names).items():
            assert value == pytest.approx(getattr(PLANTED, name), rel=1e-4), name


def test_a_wrong_unit_is_seen():
    """Milliseconds for seconds in one measurement, or bits for bytes: the other measurements contradict it."""
    rows = [work(step, Layout()) for step in SHAPES]
    times = [predict(step, Layout(), PLANTED).compute_seconds for step in SHAPES]
    times[2] *= 1000
    found = fit(rows, times, COMPUTE)
    errors = [
        sum(row[name] * found[name] for name in COMPUTE) / time - 1 for row, time in zip(rows, times, strict=True)
    ]
    assert max(map(abs, errors)) > 0.2
    assert predict(STEP, Layout(2), PLANTED).wire_bytes == 8 * STEP.parameters  # there and back, four bytes a number


@given(
    tokens=st.integers(1, 10**7),
    items=st.integers(1, 10**7),
    ranks=st.integers(1, 64),
    mode=st.sampled_from(["data", "rows"]),
)
def test_more_work_never_costs_less(tokens: int, items: int, ranks: int, mode: str):
    step = Step(tokens, 32, items, 64, 2, 64)
    layout = Layout(ranks, mode, per_machine=1, cores=1)
    cost = predict(step, layout, PLANTED)
    assert all(value >= 0 for value in cost.figures().values())
    assert predict(replace(step, tokens=2 * tokens), layout, PLANTED).seconds >= cost.seconds
    assert predict(replace(step, items=items + 1000), layout, PLANTED).parameter_seconds >= cost.parameter_seconds
    more = predict(step, replace(layout, ranks=2 * ranks), PLANTED)
    # More machines compute no longer, hold no more parameters, and send no less.
    assert work(step, replace(layout, ranks=2 * ranks))["memory_parameter"] <= work(step, layout)["memory_parameter"]
    assert more.compute_seconds <= cost.compute_seconds * (1 + 1e-9)
    assert more.wire_bytes >= cost.wire_bytes
    crowded = predict(step, replace(layout, per_machine=ranks), PLANTED)
    assert crowded.compute_seconds >= cost.compute_seconds


def test_rows_divide_the_table_and_data_divides_the_tokens():
    one, data, rows = (predict(STEP, Layout(n, mode), PLANTED) for n, mode in ((1, "data"), (4, "data"), (4, "rows")))
    assert one.wire_bytes == 0 == one.wire_seconds
    head = STEP.tokens * (STEP.head_flops * PLANTED.head_flop + STEP.items * PLANTED.logit)
    assert one.compute_seconds - rows.compute_seconds == pytest.approx(head * 3 / 4, rel=0.01)
    assert data.compute_seconds == pytest.approx(one.compute_seconds / 4, rel=0.2)
    assert rows.memory_bytes < one.memory_bytes
    big = replace(STEP, items=10_000_000)
    table = 4 * big.table
    assert (
        predict(big, Layout(8, "rows"), PLANTED).wire_bytes < table / 100 < predict(big, Layout(8), PLANTED).wire_bytes
    )


def test_four_ranks_on_two_cores_are_no_faster_than_two():
    two, four = (predict(STEP, Layout(n, "data", n, 2), PLANTED).compute_seconds for n in (2, 4))
    assert two <= four <= 1.3 * two


def test_the_committed_coefficients_predict_2_and_4_ranks():
    """As docs/scaling.md tells: time and memory within 20 %."""
    found = known()
    assert asdict(coefficients()) == found["coefficients"]
    assert {(row["ranks"], row["mode"]) for row in found["predictions"]} == {
        (n, m) for n in (2, 4) for m in ("data", "rows")
    }
    for row in found["predictions"]:
        step = Step(**{name: row[name] for name in asdict(STEP)})
        cost = predict(step, Layout(row["ranks"], row["mode"], row["ranks"], row["ranks"]), coefficients())
        assert cost.seconds == pytest.approx(row["predicted_seconds"])
        assert abs(cost.memory_bytes / 2**20 / row["memory_mb"] - 1) < 0.2, row
        assert abs(cost.seconds / row["seconds"] - 1) < 0.2, row


def test_gpus_on_paper_say_so():
    for row in on_paper(replace(STEP, items=10_000_000), 8):
        assert row["on_paper"]
        assert row["device"] == A100.name
        assert row["seconds"] > STEP.tokens * 6 * 1e7 * 64 / (8 * A100.flops)  # no faster than the data sheet

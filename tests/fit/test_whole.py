"""A network beside the transitions: one budget, one histogram, one ledger, scores added; and what training holds out."""

import numpy as np
import pytest
import torch

from dpformer import load_model
from dpformer.data import load
from dpformer.errors import DPFormerError
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import resume, start
from dpformer.models import Ensemble
from dpformer.models.ensemble import FLOOR
from dpformer.privacy import Curator, epsilon, read_ledger

BUDGET = {"seed": 3, "delta": 1e-4}
SMALL = {**BUDGET, "d": 8, "epochs": 1.5, "max_length": 8}
STATISTICS = ["histogram", "transitions 1", "transitions 2", "transitions 3"]
SHARES = [{"stage": "histogram"}, {"stage": "transitions", "share": 0.4}]
# All four stages: the network learns from the transitions, and steps go on from there.
ALL = [*SHARES, {"stage": "distil", "steps": 5}, {"stage": "dpsgd"}]


def recipe(preset="default", **options):
    return make_recipe(preset, **{**SMALL, **options})


def all_stages(**options):
    return recipe(stages=ALL, **options)


def distilled(**options):
    """The default preset, smaller: without steps."""
    return make_recipe("distilled", **{**BUDGET, "d": 8, "max_length": 8, "distil.steps": 5, **options})


def stop_after(run, stage, done):
    """Train until a stage has done so many of its parts."""
    seen = []
    reached = (stage, done)
    assert not run.train(lambda p: seen.append((p.stage, p.done)), lambda: seen[-1] == reached)
    assert seen[-1] == reached
    run.close()


def assert_same(folder, whole):
    """The same tensors to the last bit, and the same charges."""
    one, other = (load_model(place).model.state_dict() for place in (whole, folder))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    assert read_ledger(folder).entries == read_ledger(whole).entries, "an answer asked for again is the same, and free"


def test_all_answers_and_steps_are_paid_from_one_budget_and_one_histogram(data, tmp_path):
    run = start(tmp_path / "run", data, recipe())
    assert run.train()
    account = read_ledger(tmp_path / "run")
    plan = account.plan
    assert [entry.name for entry in account.entries] == STATISTICS + ["gradients"] * plan.steps
    assert plan.steps == 6
    assert account.released == set(STATISTICS) == {r.name for r in plan.releases}
    # Counted anew, from what ran; and without the transitions the same steps would have cost less.
    assert epsilon(plan.charges(), 1e-4).epsilon == pytest.approx(8, abs=2e-2)
    steps = [m for m in plan.charges() if m not in plan.releases]
    assert epsilon(steps, 1e-4).epsilon < 7.5
    assert load_model(tmp_path / "run").statement.epsilon <= 8


def test_one_histogram_is_used_by_the_transitions_and_the_network(data, tmp_path):
    """The head of the transitions and the vocabulary of the network are the most frequent items of the same answer."""
    run = start(tmp_path / "run", data, recipe(vocabulary=6))
    trainer = run.begin_steps()
    counts = run.outputs.histogram.values["histogram"]
    order = (1 + np.argsort(-counts[1:], kind="stable")).tolist()
    head = run.outputs.transitions.head.tolist()
    assert set(trainer.model.chosen[1:].tolist()) == set(order[:6])
    assert set(head) == set(order[: len(head)])
    run.close()


def test_scores_are_those_of_both(data, tmp_path):
    start(tmp_path / "run", data, recipe(weight=0.7)).train()
    ensemble = load_model(tmp_path / "run").model
    assert isinstance(ensemble, Ensemble)
    s, lengths = torch.tensor([[3, 5, 2], [4, 0, 0], [0, 0, 0]]), torch.tensor([3, 1, 0])
    scores = ensemble.scores(s, lengths)
    network, transitions = ensemble.network.scores(s, lengths.clamp_min(1)), ensemble.transitions.scores(s, lengths)
    # The same float32 numbers, some dozen of size 10 at the most, by products of other shapes and in another order.
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(scores[:2], (network + 0.7 * transitions.clamp_min(FLOOR))[:2], **near)
    # Without a history the statistics speak alone.
    torch.testing.assert_close(scores[2], transitions[2], **near)
    assert bool((scores[:, 0] == -torch.inf).all())
    assert bool(scores[:, 1:].isfinite().all())


# Resuming

PLACES = [("histogram", 1), ("transitions", 1), ("dpsgd", 2), ("dpsgd", 6)]


@pytest.mark.parametrize(("stage", "done"), PLACES)
def test_whole_stopped_anywhere_is_resumed_to_the_same_bits(data, tmp_path, stage, done):
    start(tmp_path / "whole", data, recipe()).train()
    stop_after(start(tmp_path / "run", data, recipe()), stage, done)
    torch.manual_seed(99)  # what else the process draws must not matter
    assert resume(tmp_path / "run").train()
    assert isinstance(load_model(tmp_path / "run").model, Ensemble)
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("options", [{}, {"vocabulary": 6, "weight": 0.0}, {"reattention": "logits", "dropout": 0.1}])
@pytest.mark.parametrize(("stage", "done"), [*PLACES[:2], ("distil", 2), *PLACES[2:]])
def test_all_four_stages_stopped_anywhere_are_resumed_to_the_same_bits(data, tmp_path, stage, done, options):
    start(tmp_path / "whole", data, all_stages(**options)).train()
    stop_after(start(tmp_path / "run", data, all_stages(**options)), stage, done)
    torch.manual_seed(99)
    again = resume(tmp_path / "run")
    if stage == "dpsgd":
        stop_after(again, "dpsgd", done + 2) if done < 4 else again.close()
        again = resume(tmp_path / "run")
    assert again.train()
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("make", [all_stages, distilled])
def test_a_network_that_starts_from_the_transitions_spends_the_same_budget(data, tmp_path, make):
    start(tmp_path / "run", data, make()).train()
    account = read_ledger(tmp_path / "run")
    plan = account.plan
    assert account.released == {r.name for r in plan.releases}
    assert len(account.entries) == 4 + plan.steps
    assert plan.steps == (0 if make is distilled else 6)
    assert epsilon(plan.charges(), 1e-4).epsilon == pytest.approx(8, abs=2e-2)
    ensemble = load_model(tmp_path / "run").model
    assert isinstance(ensemble, Ensemble)
    assert set(ensemble.transitions.head.tolist()) <= set(ensemble.network.chosen.tolist())


def test_the_steps_start_from_the_distilled_network(data, tmp_path):
    """Not from a new one: with another number of steps of distillation the steps start elsewhere."""
    weights = []
    for name, steps in (("few", 2), ("more", 9)):
        run = start(tmp_path / name, data, all_stages(**{"distil.steps": steps}))
        weights.append(run.begin_steps().model.embedding.weight.detach().clone())
        run.close()
    assert not torch.equal(*weights)


class Dying(Curator):
    """Dies when it is asked for the third answer."""

    def ask(self, query):
        if query.name == "transitions 2":
            raise KeyboardInterrupt
        return super().ask(query)


@pytest.mark.parametrize("make", [recipe, all_stages, distilled])
def test_a_crash_among_the_transitions_costs_nothing(data, tmp_path, make):
    start(tmp_path / "whole", data, make()).train()
    run = start(tmp_path / "run", data, make(), make_curator=Dying)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.close()
    assert [entry.name for entry in read_ledger(tmp_path / "run").entries] == STATISTICS[:2]
    assert resume(tmp_path / "run").train()
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("make", [all_stages, distilled])
def test_a_crash_while_the_network_learns_from_the_transitions_costs_nothing(data, tmp_path, make):
    start(tmp_path / "whole", data, make()).train()
    run = start(tmp_path / "run", data, make())

    def trouble(progress):
        if progress.stage == "distil" and progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(trouble)
    run.close()
    assert len(read_ledger(tmp_path / "run").entries) == 4
    assert resume(tmp_path / "run").train()
    assert_same(tmp_path / "run", tmp_path / "whole")


# Recipes that cannot be paid for, or have nothing to start from


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{"stage": "histogram"}, {"stage": "distil"}, {"stage": "dpsgd"}], "distil needs the stage transitions"),
        ([{"stage": "transitions"}, {"stage": "dpsgd"}], "transitions needs the stage histogram"),
        ([*SHARES, {"stage": "distil"}], "must sum to 1"),
        (SHARES, "a network goes with the stages distil and dpsgd"),
        ([{"stage": "dpsgd"}, {"stage": "histogram"}], "in this order"),
        ([{"stage": "dpsgd"}, {"stage": "dpsgd"}], "each once"),
        ([], "must be some of"),
        ([{"stage": "dpsgd"}], "a vocabulary needs item frequencies"),
        ([{"stage": "train"}], "stage"),
    ],
)
def test_stages_that_do_not_go_together_are_refused(stages, said):
    with pytest.raises(DPFormerError, match=said):
        make_recipe("default", stages=stages)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": float("inf")}, "without privacy"),
        ({"transitions.share": 0.97}, "leave nothing for the steps; lower one"),
        ({"transitions.share": 1.0}, "leave nothing for the steps; lower one"),
        ({"histogram.share": 0.65}, "leave nothing for the steps; lower one"),
    ],
)
def test_statistics_that_cannot_be_paid_are_refused(options, said):
    with pytest.raises(DPFormerError, match=said):
        recipe(**options)


# What training sees


@pytest.mark.parametrize(("hold_out", "missing"), [("validation", 2), ("test", 1), ("nothing", 0)])
def test_training_sees_all_but_what_is_held_out(data, tmp_path, hold_out, missing):
    dataset = load(data)
    run = start(tmp_path / "run", data, recipe("pure", hold_out=hold_out, vocabulary=None))
    lengths = dataset.sequences.lengths
    expected = [n - missing if n >= 3 else n for n in lengths.tolist()]
    assert run.curator._people.lengths.tolist() == expected
    run.close()


@pytest.mark.parametrize(
    ("hold_out", "item", "code"), [("test", "validation", 2), ("nothing", "test", 2), ("test", "test", 0)]
)
def test_an_item_that_training_saw_is_not_evaluated(data, tmp_path, dpformer, hold_out, item, code):
    start(tmp_path / "run", data, make_recipe("transitions", hold_out=hold_out, **BUDGET)).train()
    done = dpformer("evaluate", tmp_path / "run", "--item", item, "--json")
    assert done.code == code, done.err
    assert code == 0 or "has seen the" in done.err

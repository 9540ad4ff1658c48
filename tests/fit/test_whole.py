"""A network with a private prior: one budget, one ledger, scores added; and what training holds out."""

import pytest
import torch

from dpformer import load_model
from dpformer.data import load
from dpformer.errors import DPFormerError
from dpformer.fit import statistics_stages as releases
from dpformer.fit.recipe import PRIOR, make_recipe
from dpformer.fit.run import resume, start
from dpformer.models import Ensemble
from dpformer.models.ensemble import FLOOR
from dpformer.privacy import epsilon, read_ledger


def recipe(**options):
    usual = {"preset": "pure", "seed": 3, "delta": 1e-4, "d": 8, "epochs": 3.0, "max_length": 8}
    return make_recipe(**{**usual, "prior_share": 0.4, **options})


def test_all_releases_and_steps_are_paid_from_one_budget(data, tmp_path):
    run = start(tmp_path / "run", data, recipe())
    assert run.train()
    account = read_ledger(tmp_path / "run")
    plan = account.plan
    names = [r.name for r in plan.releases]
    assert sum(name.startswith(PRIOR) for name in names) == 4
    assert len(account.entries) == len(names) + plan.steps
    assert account.released == set(names)
    # Counted anew, from what ran; and without the prior the same steps would have cost less.
    assert epsilon(plan.charges(), 1e-4).epsilon == pytest.approx(8, abs=2e-2)
    steps = [m for m in plan.charges() if m not in plan.releases]
    assert epsilon(steps, 1e-4).epsilon < 7.5
    assert load_model(tmp_path / "run").statement.epsilon <= 8


def test_scores_are_those_of_both(data, tmp_path):
    start(tmp_path / "run", data, recipe(prior_weight=0.7)).train()
    released = load_model(tmp_path / "run")
    joined = released.model
    assert isinstance(joined, Ensemble)
    s, lengths = torch.tensor([[3, 5, 2], [4, 0, 0], [0, 0, 0]]), torch.tensor([3, 1, 0])
    found = released.scores(s, lengths)
    network, prior = joined.network.scores(s, lengths.clamp_min(1)), joined.transitions.scores(s, lengths)
    # The same float32 numbers, some dozen of size 10 at the most, by products of other shapes and in another order.
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found[:2], (network + 0.7 * prior.clamp_min(FLOOR))[:2], **near)
    # Without a history the statistics speak alone.
    torch.testing.assert_close(found[2], prior[2], **near)
    assert bool((found[:, 0] == -torch.inf).all())
    assert bool(found[:, 1:].isfinite().all())


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_that_was_stopped_goes_on_with_the_same_prior(data, tmp_path, monkeypatch, steps):
    whole = start(tmp_path / "whole", data, recipe())
    whole.train()
    if steps:
        seen = []
        run = start(tmp_path / "run", data, recipe())
        assert not run.train(seen.append, lambda: len(seen) == steps)
    else:  # after the histogram, before the prior
        with monkeypatch.context() as patch:
            patch.setattr(releases, "prior", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                start(tmp_path / "run", data, recipe())
    if steps:
        run.close()
    assert resume(tmp_path / "run").train()
    one, other = load_model(tmp_path / "whole").model, load_model(tmp_path / "run").model
    assert isinstance(one, Ensemble)
    assert isinstance(other, Ensemble)
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    entries = [read_ledger(tmp_path / name).entries for name in ("whole", "run")]
    assert entries[1] == entries[0], "what was asked again got the same answer, and is not paid again"


@pytest.mark.parametrize("epochs", [0.0, 3.0])
def test_a_network_that_starts_from_the_prior_spends_the_same_budget(data, tmp_path, epochs):
    share = 0.4 if epochs else 1.0
    start(tmp_path / "run", data, recipe(distil=5, epochs=epochs, histogram_share=0.0, prior_share=share)).train()
    account = read_ledger(tmp_path / "run")
    plan = account.plan
    assert account.released == {r.name for r in plan.releases}
    assert len(account.entries) == 4 + plan.steps
    assert (plan.steps == 0) == (epochs == 0)
    assert epsilon(plan.charges(), 1e-4).epsilon == pytest.approx(8, abs=2e-2)
    joined = load_model(tmp_path / "run").model
    assert isinstance(joined, Ensemble)
    head = joined.transitions.head
    assert set(head.tolist()) <= set(joined.network.chosen.tolist())


@pytest.mark.parametrize("histogram_share", [0.0, 0.03])
def test_a_network_that_starts_from_the_prior_can_be_resumed(data, tmp_path, histogram_share):
    options = {"distil": 5, "histogram_share": histogram_share, "vocabulary": 6, "prior_weight": 0.0}
    start(tmp_path / "whole", data, recipe(**options)).train()
    seen = []
    run = start(tmp_path / "run", data, recipe(**options))
    assert not run.train(seen.append, lambda: len(seen) == 2)
    run.close()
    assert resume(tmp_path / "run").train()
    one, other = load_model(tmp_path / "whole").model, load_model(tmp_path / "run").model
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_crash_while_it_learns_from_the_prior_costs_nothing(data, tmp_path, monkeypatch):
    options = {"distil": 5, "epochs": 0.0, "histogram_share": 0.0, "prior_share": 1.0}
    start(tmp_path / "whole", data, recipe(**options)).train()
    with monkeypatch.context() as patch:
        patch.setattr(releases, "distil", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "run", data, recipe(**options))
    assert resume(tmp_path / "run").train()
    one, other = load_model(tmp_path / "whole").model, load_model(tmp_path / "run").model
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert len(read_ledger(tmp_path / "run").entries) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"distil": 5, "prior_share": 0.0}, "distil is for"),
        ({"epochs": 0.0}, "epochs = 0"),
        ({"epochs": 0.0, "distil": 5}, "must sum to 1"),
    ],
)
def test_a_start_from_nothing_is_refused(options, said):
    with pytest.raises(DPFormerError, match=said):
        recipe(**options)


@pytest.mark.parametrize(("hold_out", "missing"), [("validation", 2), ("test", 1), ("nothing", 0)])
def test_training_sees_all_but_what_is_held_out(data, tmp_path, hold_out, missing):
    dataset = load(data)
    run = start(tmp_path / "run", data, recipe(hold_out=hold_out, prior_share=0.0, vocabulary=None))
    lengths = dataset.sequences.lengths
    expected = [n - missing if n >= 3 else n for n in lengths.tolist()]
    assert run.curator._people.lengths.tolist() == expected
    run.close()


@pytest.mark.parametrize(
    ("hold_out", "item", "code"), [("test", "validation", 2), ("nothing", "test", 2), ("test", "test", 0)]
)
def test_an_item_that_training_saw_is_not_evaluated(data, tmp_path, dpformer, hold_out, item, code):
    start(
        tmp_path / "run", data, recipe(hold_out=hold_out, model="transitions", prior_share=0.0, preset="default")
    ).train()
    done = dpformer("evaluate", tmp_path / "run", "--item", item, "--json")
    assert done.code == code, done.err
    assert code == 0 or "has seen the" in done.err


@pytest.mark.parametrize(
    "options", [{"epsilon": float("inf")}, {"model": "transitions"}, {"prior_share": 0.98}, {"prior_share": 1.0}]
)
def test_priors_that_cannot_be_paid_are_refused(options):
    with pytest.raises(DPFormerError, match=r"prior"):
        recipe(**options)

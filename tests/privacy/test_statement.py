"""The statement: built from the ledger, valid by its schema, plain about what is not private."""

import json
import math
from pathlib import Path

import jsonschema
import pytest

import dpformer.privacy
from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import epsilon
from dpformer.privacy.ledger import create_ledger, fingerprint, read_ledger
from dpformer.privacy.plan import make_plan
from dpformer.privacy.statement import TuningPart, build_statement, json_schema, parse_statement
from dpformer.privacy.tuning import Tuning, tuned_epsilon

SCHEMA = Path(__file__).parents[2] / "docs" / "privacy.schema.json"
PUBLIC = ("the catalogue of items", "the maximum length, 200", "item frequencies (assume-public)")
NO_TUNING = TuningPart(kind="none")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    plan = make_plan(6040, 5, 1e-5, 1024, steps=50, shares={"histogram": 0.03})
    with create_ledger(folder, plan) as ledger:
        ledger.authorise_release("histogram", fingerprint("n"), fingerprint("d"))
        for step in range(1, 31):
            ledger.authorise_step(step, fingerprint(f"n{step}"), fingerprint("d"))
    return plan, read_ledger(folder)


@pytest.fixture(scope="module")
def statement(run):
    return build_statement(*run, "system", PUBLIC, NO_TUNING)


def test_it_tells_what_was_spent_not_what_was_planned(run, statement):
    plan, account = run
    assert statement.epsilon == pytest.approx(epsilon(plan.mechanisms(30), 1e-5).epsilon)
    assert statement.epsilon < 5 == statement.budget
    assert (statement.steps.charged, statement.steps.planned) == (30, 50)
    assert statement.accountant.used == "pld"
    assert statement.epsilon == statement.accountant.pld < statement.accountant.rdp
    assert statement.epsilon_at_delta_1_over_users < statement.epsilon
    assert statement.releases[0].share == pytest.approx(0.03, rel=1e-4)
    assert statement.ledger.hash == account.position.hash


def test_it_names_all_that_the_reader_must_know(statement):
    data = json.loads(statement.to_json())
    assert data["unit"].startswith("one user")
    assert data["neighbours"] == "add or remove one user"
    assert data["steps"]["sampler"] == "poisson"
    assert "the number of users" in data["assumed_public"]
    assert set(PUBLIC) < set(data["assumed_public"])
    assert any("served user" in item for item in data["not_covered"])
    assert data["insecure"] == []
    assert {"dpformer", "dp-accounting", "torch"} <= set(data["versions"])
    text = statement.text()
    for words in ("1e-05)-differential privacy", "RDP", "Poisson", "histogram", "Not covered", "assume-public", "coin"):
        assert words in text


def test_it_is_valid_and_reads_back(statement):
    jsonschema.validate(json.loads(statement.to_json()), json_schema())
    assert parse_statement(statement.to_json()) == statement


def test_the_committed_schema_is_current():
    """To renew it: python -c "see docs/privacy.md" > docs/privacy.schema.json"""
    assert json.loads(SCHEMA.read_text()) == json_schema()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"epsilon": -1}, "epsilon"),
        ({"delta": 2}, "delta"),
        ({"surprise": 1}, "surprise"),
        ({"private": False}, "private must be false"),
        ({"unit": None}, "unit"),
    ],
)
def test_a_changed_statement_is_refused(statement, change, word):
    with pytest.raises(PrivacyError, match=word):
        parse_statement(json.dumps({**json.loads(statement.to_json()), **change}))


def test_a_seeded_run_is_marked_insecure_everywhere(run):
    seeded = build_statement(*run, "seeded", PUBLIC, NO_TUNING)
    assert any("seed" in reason for reason in seeded.insecure)
    assert seeded.text().startswith("INSECURE")
    with pytest.raises(PrivacyError, match="insecure"):
        parse_statement(json.dumps({**json.loads(seeded.to_json()), "insecure": []}))


def test_a_run_without_privacy_says_so():
    free = build_statement(make_plan(100, math.inf, 1e-3, 10, steps=5), None, "system", PUBLIC, NO_TUNING)
    assert free.epsilon == "inf"
    assert not free.private
    assert free.noise.mode == "none"
    assert free.text().startswith("NOT PRIVATE")
    assert free.attack.true_positive_rate == 1
    jsonschema.validate(json.loads(free.to_json()), json_schema())


def test_tuning_is_accounted_or_listed(run):
    plan, account = run
    paid = build_statement(*run, "system", PUBLIC, Tuning(10))
    plain = build_statement(*run, "system", PUBLIC, NO_TUNING)
    assert paid.epsilon == paid.tuning.epsilon == tuned_epsilon(account.spent(), Tuning(10), plan.delta) > plain.epsilon
    assert paid.attack.true_positive_rate > plain.attack.true_positive_rate
    assert paid.epsilon_at_delta_1_over_users == paid.epsilon
    assert "10 trials on average" in paid.text()
    with pytest.raises(PrivacyError, match="include the tuning"):
        parse_statement(json.dumps({**json.loads(paid.to_json()), "epsilon": plain.epsilon}))
    listed = TuningPart(kind="listed", configurations=("lr 1e-2", "lr 5e-3"))
    text = build_statement(*run, "system", PUBLIC, listed).text()
    assert "NOT accounted; 2 configurations" in text
    assert "lr 5e-3" in text
    with pytest.raises(ValueError, match="list the configurations"):
        TuningPart(kind="listed")
    with pytest.raises(ValueError, match="needs mean_trials"):
        TuningPart(kind="accounted", mean_trials=3)


def test_a_statement_needs_the_runs_own_ledger(run):
    plan, account = run
    with pytest.raises(PrivacyError, match="needs its ledger"):
        build_statement(plan, None, "system", PUBLIC, NO_TUNING)
    with pytest.raises(PrivacyError, match="another plan"):
        build_statement(make_plan(6040, 5, steps=50), account, "system", PUBLIC, NO_TUNING)


def test_everything_exported_exists():
    for name in dpformer.privacy.__all__:
        assert getattr(dpformer.privacy, name).__module__.startswith("dpformer.privacy.")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dpformer.privacy.nonsense

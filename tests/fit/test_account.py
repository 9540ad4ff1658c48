"""Runs that are charged to an account of people: before they ask, once, and as their statements say."""

import json
import shutil
from xml.etree import ElementTree

import pytest

from dpformer import DPFormer
from dpformer.errors import PrivacyError
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import resume, start
from dpformer.privacy import Curator, parse_statement, read_ledger
from dpformer.privacy.account import Cap, PeopleAccount, Receipt, together
from dpformer.trust.verify.ledger import account_against_run
from tests.fit.conftest import small_log
from tests.fit.test_commands import assert_one_line, strict_json

DELTA = 1e-3


@pytest.fixture
def account(tmp_path) -> PeopleAccount:
    return PeopleAccount.create(tmp_path / "people.account", Cap(8, DELTA))


def recipe(epsilon: float = 3.0):
    return make_recipe("popularity", epsilon=epsilon, delta=DELTA)


def statement(folder):
    return parse_statement((folder / "privacy.json").read_bytes())


def checked(folder):
    return account_against_run(folder, statement(folder))


def test_two_runs_say_what_they_spend_alone_and_together(tmp_path, data, account):
    for name in "ab":
        assert start(tmp_path / name, data, recipe(), account=account).train()
    first, second = statement(tmp_path / "a"), statement(tmp_path / "b")
    assert first.epsilon == second.epsilon == pytest.approx(3, rel=1e-5)
    assert first.account.epsilon == pytest.approx(3, rel=1e-5)
    assert second.account.epsilon == together(account.read().runs, DELTA) > 4
    assert (second.account.runs, second.account.cap) == (2, 8)
    assert "this run alone. Together with 1 earlier run charged to account" in second.text()
    assert checked(tmp_path / "a").good
    assert checked(tmp_path / "b").good
    assert second.text() in (tmp_path / "b" / "README.md").read_text()


def test_without_an_account_the_statement_says_alone(tmp_path, data):
    assert start(tmp_path / "a", data, recipe()).train()
    assert "of this run alone: other releases on the same people add to it" in statement(tmp_path / "a").text()


def test_years_add_up_in_the_statement(tmp_path, data):
    PeopleAccount.create(tmp_path / "account", Cap(3, DELTA, "year"))
    for year in (2025, 2026):
        account = PeopleAccount(tmp_path / "account", clock=lambda year=year: f"{year}-03-01T00:00:00+00:00")
        assert start(tmp_path / f"{year}", data, recipe(), account=account).train()
    last = statement(tmp_path / "2026")
    assert last.account.epsilon_in_period == pytest.approx(3, rel=1e-5)
    assert last.account.epsilon > 4
    assert "2026 has spent 3; years add up, and the pair above is for all years" in last.text()
    assert checked(tmp_path / "2026").good


def test_a_refused_run_asks_nothing_and_can_be_made_smaller(tmp_path, data, account):
    assert start(tmp_path / "a", data, recipe(7), account=account).train()
    with pytest.raises(PrivacyError, match="would fit"):
        start(tmp_path / "b", data, recipe(7), account=account)
    assert not (tmp_path / "b" / "ledger.jsonl").exists()
    assert start(tmp_path / "b", data, recipe(1), account=account).train()


def test_a_failed_run_stays_charged_and_a_resumed_one_is_charged_once(tmp_path, data, account):
    run = start(tmp_path / "a", data, recipe(), account=account)
    run.close()  # as if it was killed before its first answer
    assert len(account.read().runs) == 1
    assert resume(tmp_path / "a").train()
    assert len(account.read().runs) == 1
    assert statement(tmp_path / "a").account.runs == 1


def test_resume_and_the_next_fit_know_an_old_copy(tmp_path, data, account):
    shutil.copytree(account.folder, tmp_path / "old")
    start(tmp_path / "a", data, recipe(), account=account).close()
    shutil.rmtree(account.folder)
    shutil.move(tmp_path / "old", account.folder)
    for use in (lambda: resume(tmp_path / "a"), lambda: start(tmp_path / "b", data, recipe(), account=account)):
        with pytest.raises(PrivacyError, match="old copy"):
            use()


# Planted defects


class Forgetful(PeopleAccount):
    """Says that it charged, and does not."""

    def charge(self, run, known=(), over=False):
        spending = self.read()
        return Receipt(spending.id, len(spending.runs) + 1, "0" * 64)


class Late(PeopleAccount):
    """Charges when the run has ended."""

    def charge(self, run, known=(), over=False):
        self.later = run
        return Receipt(self.read().id, 1, "0" * 64)


class Cheap(PeopleAccount):
    """Charges half of the answers."""

    def charge(self, run, known=(), over=False):
        from dataclasses import replace

        halved = tuple(replace(c, noise_multiplier=2 * c.noise_multiplier) for c in run.charges)
        return super().charge(replace(run, charges=halved), known)


def test_a_charge_that_was_forgotten_or_came_after_the_data_was_asked_stops_the_run(tmp_path, data, account):
    for kind in (Forgetful, Late):
        planted, asked = kind(account.folder), []

        class Watched(Curator):
            def ask(self, query, asked=asked):
                asked.append(query.name)
                return super().ask(query)

        with pytest.raises(PrivacyError, match="has a receipt for"):
            start(tmp_path / kind.__name__, data, recipe(), make_curator=Watched, account=planted).train()
        assert not asked


def test_verify_notices_a_charge_that_is_not_the_plan(tmp_path, data, account):
    assert start(tmp_path / "a", data, recipe(), account=Cheap(account.folder)).train()
    outcome = checked(tmp_path / "a")
    assert not outcome.good
    assert "is not this run's plan" in outcome.detail


def test_verify_notices_an_account_or_a_statement_that_was_changed(tmp_path, data, account):
    for name in "ab":
        assert start(tmp_path / name, data, recipe(), account=account).train()
    said = statement(tmp_path / "b")
    for change in ({"epsilon": 3.0}, {"cap": 80.0}, {"runs": 1}, {"epsilon_in_period": 3.0}):
        changed = said.model_copy(update={"account": said.account.model_copy(update=change)})
        assert not account_against_run(tmp_path / "b", changed).good, change
    lines = (account.folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (account.folder / "ledger.jsonl").write_bytes(b"".join(lines[:2]))
    with pytest.raises(PrivacyError):
        checked(tmp_path / "b")


def test_the_charge_is_on_disk_before_the_first_answer(tmp_path, data, account):
    seen = []

    class Watched(Curator):
        def ask(self, query):
            seen.append([run.run_id for run in account.read().runs])
            return super().ask(query)

    assert start(tmp_path / "a", data, recipe(), make_curator=Watched, account=account).train()
    assert seen == [[read_ledger(tmp_path / "a").run_id]]


# As people use it


def test_the_estimator_charges_its_account(account):
    for _ in range(2):
        model = DPFormer("popularity", epsilon=3, delta=DELTA, account=account.folder).fit(small_log())
    assert model.privacy.account.runs == 2
    with pytest.raises(PrivacyError, match="would fit"):
        DPFormer("popularity", epsilon=8, delta=DELTA, account=account.folder).fit(small_log())


def test_the_commands(tmp_path, data, dpformer):
    people = tmp_path / "people.account"
    assert dpformer("account", "new", people, "--epsilon", 5, "--delta", DELTA).code == 0
    assert_one_line(dpformer("account", "new", people, "--epsilon", 5), "exists already")
    assert_one_line(dpformer("account", "show", tmp_path / "none"), "not an account of people")
    options = ["--preset", "popularity", "--epsilon", 3, "--delta", DELTA, "--quiet"]
    done = dpformer("fit", data, "--run", tmp_path / "a", *options, "--account", people)
    assert done.code == 0
    assert "no other run so far" in done.out
    assert dpformer("fit", data, "--run", tmp_path / "b", *options).code == 0  # without the account
    for _ in range(2):
        assert "is charge 2 of" in dpformer("account", "add", people, tmp_path / "b").err
    shown = strict_json(dpformer("account", "show", people, "--json").out)
    assert [run["name"] for run in shown["runs"]] == ["a", "b"]
    assert shown["spent"] == shown["for_life"] == shown["runs"][1]["together"] > 4
    assert 0 < shown["left"] < 3
    text = dpformer("account", "show", people).out
    assert "cap epsilon 5 at delta 0.001" in text
    assert "█" in text
    assert dpformer("account", "show", people, "--plot", tmp_path / "spent.svg").code == 0
    drawn = ElementTree.parse(tmp_path / "spent.svg").getroot()
    words = " ".join(drawn.itertext())
    assert "cap 5" in words
    assert shown["runs"][0]["time"][8:10] in words
    dry = dpformer("fit", data, *options[:-1], "--account", people, "--dry-run")
    assert f"epsilon {shown['left']:g} would" in " ".join(dry.out.split())
    refused = dpformer("fit", data, "--run", tmp_path / "c", *options, "--account", people)
    assert_one_line(refused, f"epsilon {shown['left']:g} would fit")
    assert json.loads(people.joinpath("ledger.jsonl").read_text().splitlines()[-1])["name"] == "b"
    assert_one_line(dpformer("fit", data, "--run", tmp_path / "d", "--account", tmp_path / "none"), "not an account")
    assert not (tmp_path / "d").exists()

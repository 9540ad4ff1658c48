"""The statement: built from the ledger, valid by its schema, true of its run, bounds rounded up."""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import dp_accounting
import jsonschema
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

import dpformer.privacy
from dpformer.data.split import trained_on
from dpformer.errors import PrivacyError
from dpformer.privacy.account import Cap, PeopleAccount, RunCharge, Spending
from dpformer.privacy.accounting import NEIGHBOURS, epsilon
from dpformer.privacy.attack_bounds import attack_bound, percent_up
from dpformer.privacy.build import Circumstances, Conditions, build_statement
from dpformer.privacy.ledger import create_ledger, read_ledger
from dpformer.privacy.plan import make_plan
from dpformer.privacy.statement import DataPart, TuningPart, json_schema, parse_statement
from dpformer.privacy.tuning import Tuning, tuned_epsilon
from dpformer.privacy.wording import round_up
from tests.asking import charge
from tests.people import people

SCHEMA = Path(__file__).parents[2] / "docs" / "privacy.schema.json"
API = SCHEMA.parent / "api" / "privacy.md"
NO_TUNING = TuningPart(kind="none")
LOG = DataPart(catalogue="log", trained_on="each user's events but the last two")
SLACK = "float32 sums of a micro-batch are off by less than m 2^-21"
ABOUT = Circumstances(LOG, assumed_public=("the catalogue of items",), assumptions=(SLACK,))


def charged(folder: Path, plan, answers: int):
    """The account of a run of which so many answers were charged."""
    with create_ledger(folder, plan) as ledger:
        charge(ledger, *range(answers))
    return plan, read_ledger(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Poisson steps, 30 of 50 made."""
    plan = make_plan(6040, 5, 1e-5, 1024, steps=50, shares={"histogram": 0.03})
    return charged(tmp_path_factory.mktemp("run"), plan, 31)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Full-batch steps."""
    return charged(tmp_path_factory.mktemp("full"), make_plan(6040, 5, 1e-5, steps=4, shares={"histogram": 0.03}), 5)


@pytest.fixture(scope="module")
def statistics(tmp_path_factory):
    """Statistics alone: no steps."""
    plan = make_plan(6040, 5, 1e-5, shares={"histogram": 0.03, "transitions 1": 0.97}, threshold_delta=1.23e-6)
    return charged(tmp_path_factory.mktemp("statistics"), plan, 2)


@pytest.fixture(scope="module")
def statement(run):
    return build_statement(*run, ABOUT, NO_TUNING)


def test_it_tells_what_was_spent_not_what_was_planned(run, statement):
    plan, account = run
    assert statement.format == 2
    assert statement.epsilon == pytest.approx(epsilon(plan.charges(30), 1e-5).epsilon)
    assert statement.epsilon < 5 == statement.budget
    assert (statement.steps.charged, statement.steps.planned) == (30, 50)
    assert statement.accountant.used == "pld"
    assert statement.epsilon == statement.accountant.pld < statement.accountant.rdp
    assert statement.epsilon_at_delta_1_over_users < statement.epsilon
    assert statement.releases[0].share == pytest.approx(0.03, rel=1e-4)
    assert statement.ledger.hash == account.position.hash
    assert statement.ledger.entries == 31


def test_an_answer_that_was_not_charged_is_not_in_it(tmp_path):
    plan = make_plan(6040, 5, 1e-5, shares={"histogram": 0.03, "transitions 1": 0.97})
    half = build_statement(*charged(tmp_path, plan, 1), ABOUT, NO_TUNING)
    assert [release.name for release in half.releases] == ["histogram"]
    assert half.epsilon == pytest.approx(epsilon(plan.releases[:1], 1e-5).epsilon)


def test_it_names_all_that_the_reader_must_know(statement):
    data = json.loads(statement.to_json())
    assert data["unit"].startswith("one user")
    assert data["neighbours"] == "the number of users stays, and one user's events are replaced by none"
    assert data["steps"]["sampler"] == "poisson"
    assert data["assumed_public"] == ["the number of users", "the catalogue of items"]
    assert data["assumptions"] == [SLACK]
    assert data["noise"]["mode"] == "exact"
    assert "2^-26" in data["noise"]["grid"]
    assert any("served user" in item for item in data["not_covered"])
    assert data["insecure"] == []
    assert {"dpformer", "dp-accounting", "torch"} <= set(data["versions"])
    text = statement.text()
    for words in (
        "1e-05)-differential privacy",
        "replaced by none",
        "RDP",
        "Poisson batches of 1024 expected (rate 0.1695)",
        "histogram",
        "Not covered",
        "coin",
        "rounded ideal Gaussian",
        "whole multiple of a public step",
        f"Assumption: {SLACK}",
        "Trained on: each user's events but the last two",
    ):
        assert words in text


def test_a_declared_population_is_stated_as_such(run, statement):
    assert not statement.users_declared
    assert "declared population" not in statement.text()
    plan, account = (replace(run[0], declared=True), replace(run[1], plan=replace(run[0], declared=True)))
    declared = build_statement(plan, account, ABOUT, NO_TUNING)
    assert declared.users_declared
    assert declared.users == 6040
    assert declared.assumed_public == ("a declared population of 6,040 users", "the catalogue of items")
    assert "Assumed public: a declared population of 6,040 users; the catalogue" in declared.text()
    assert parse_statement(declared.to_json()) == declared


def test_nothing_is_said_of_sampling_where_nothing_is_sampled(full, statistics):
    for run in (full, statistics):
        made = build_statement(*run, Circumstances(LOG), NO_TUNING)
        assert "Poisson" not in made.text()
        assert "rate" not in made.text().replace("clip rates", "")
        assert "Assumption" not in made.text()
    assert build_statement(*full, Circumstances(LOG), NO_TUNING).steps.sampler == "full"
    alone = build_statement(*statistics, Circumstances(LOG), NO_TUNING)
    assert alone.steps is None
    assert json.loads(alone.to_json())["steps"] is None
    assert "Steps" not in alone.text()
    assert "sampl" not in json.dumps(json.loads(alone.to_json())["noise"])


@pytest.mark.parametrize(
    ("mode", "says", "not_says"),
    [
        ("log", "ASSUMED public", "given from outside"),
        ("public", "given from outside of the log and is public", "ASSUMED"),
        ("private", "noisy counts above a threshold; delta includes 1.3e-06", "ASSUMED"),
    ],
)
def test_the_catalogue_is_told_near_the_top(statistics, mode, says, not_says):
    made = build_statement(*statistics, Circumstances(DataPart(catalogue=mode)), NO_TUNING)
    first = "\n".join(made.text().splitlines()[:3])
    assert says in first
    assert not_says not in made.text()
    assert made.data.catalogue == mode


def test_a_thresholds_delta_is_the_plans_and_everything_includes_it(statistics):
    plan, account = statistics
    made = build_statement(plan, account, Circumstances(DataPart(catalogue="private")), NO_TUNING)
    assert made.data.threshold_delta == plan.threshold_delta == 1.23e-6
    assert made.delta == 1e-5
    assert made.epsilon == epsilon(plan.releases, 1e-5 - 1.23e-6).epsilon
    assert made.epsilon <= 5
    assert made.epsilon > epsilon(plan.releases, 1e-5).epsilon
    assert made.epsilon_at_delta_1_over_users == epsilon(plan.releases, 1 / 6040 - 1.23e-6).epsilon
    noise_alone = attack_bound(plan.releases, 1e-5 - 1.23e-6)
    more = made.attack.true_positive_rate - noise_alone.true_positive_rate
    assert 1.2e-6 < more < 1.4e-6
    assert made.attack.advantage > noise_alone.advantage


def test_each_trial_of_a_tuning_pays_for_its_own_threshold(statistics):
    plan, account = statistics
    made = build_statement(plan, account, Circumstances(DataPart(catalogue="private")), Tuning(3))
    assert made.epsilon == tuned_epsilon(plan.releases, Tuning(3), 1e-5 - 3 * 1.23e-6)
    with pytest.raises(PrivacyError, match="leave nothing of delta"):
        build_statement(plan, account, Circumstances(DataPart(catalogue="private")), Tuning(10))


def test_what_the_guarantee_does_not_cover_is_told(statistics):
    part = DataPart(catalogue="log", outside_guarantee=("items with fewer than 5 events were dropped",))
    text = build_statement(*statistics, Circumstances(part), NO_TUNING).text()
    assert "OUTSIDE OF THE GUARANTEE: items with fewer than 5 events were dropped" in text.splitlines()[3]


@pytest.mark.parametrize("hold_out", ["validation", "test", "nothing"])
def test_what_was_trained_on_is_what_the_words_say(statistics, hold_out):
    """The sentence for each `hold_out`, against what training is given of sequences of 1 to 5 events."""
    words = trained_on(hold_out)
    made = build_statement(*statistics, Circumstances(DataPart(catalogue="log", trained_on=words)), NO_TUNING)
    assert f"Trained on: {words}." in made.text()
    dropped = {"but the last two": 2, "but the last one": 1, "all events": 0}
    last = next(count for part, count in dropped.items() if part in words)
    assert ("fewer than three" in words) == (last > 0)
    left = people([[1] * n for n in range(1, 6)]).training(hold_out)
    assert left.lengths.tolist() == [n if n < 3 else n - last for n in range(1, 6)]


# --- bounds are rounded up ------------------------------------------------------------------------------------------------


@given(st.floats(1e-12, 1e12), st.integers(1, 8))
def test_a_rounded_bound_is_never_below(value, digits):
    """But for the last part in 10^9, which is float arithmetic, and by less than one unit of the last digit above."""
    rounded = round_up(value, digits)
    assert Fraction(rounded) >= Fraction(value) * (1 - Fraction(1, 10**9))
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    assert rounded - value < unit * (1 + 1e-6)
    assert float(f"{rounded:.{digits}g}") == pytest.approx(rounded, rel=1e-12)


def test_what_is_not_above_0_or_not_finite_stays():
    assert round_up(0.0, 3) == 0
    assert round_up(math.inf, 3) == math.inf


@given(st.floats(0, 1))
def test_a_percentage_is_never_below(share):
    assert float(percent_up(share)[:-1]) >= share * 100 - 1e-9
    assert float(percent_up(share)[:-1]) < share * 100 + 0.1001


def test_every_bound_in_the_words_is_at_least_the_number_in_the_file(run, full, statistics):
    for made in (build_statement(*which, ABOUT, NO_TUNING) for which in (run, full, statistics)):
        text = made.text()
        headline = re.search(r"^\(([0-9.e+-]+), ([0-9.e+-]+)\)-differential", text, re.M)
        pld, rdp = re.search(r"\(PLD ([0-9.e+-]+), RDP ([0-9.e+-]+)\)", text).groups()
        other = re.search(r"At delta = 1/users = \S+: epsilon ([0-9.e+-]+)\.$", text, re.M).group(1)
        found, coin = re.search(r"at most ([0-9.]+)% of members; .* at most ([0-9.]+)% of the time", text).groups()
        assert made.epsilon <= float(headline.group(1)) < made.epsilon * 1.001
        assert made.delta <= float(headline.group(2)) < made.delta * 1.001
        assert made.accountant.pld <= float(pld) < made.accountant.pld * 1.001
        assert made.accountant.rdp <= float(rdp) < made.accountant.rdp * 1.001
        assert made.epsilon_at_delta_1_over_users <= float(other)
        assert made.attack.true_positive_rate * 100 <= float(found) < made.attack.true_positive_rate * 100 + 0.1
        assert (1 + made.attack.advantage) * 50 <= float(coin) < (1 + made.attack.advantage) * 50 + 0.1


def test_a_delta_with_many_digits_is_rounded_up(tmp_path):
    plan = make_plan(6040, 5, 1 / 300_001, shares={"histogram": 1.0})
    text = build_statement(*charged(tmp_path, plan, 1), ABOUT, NO_TUNING).text()
    shown = float(re.search(r"\([0-9.]+, ([0-9.e+-]+)\)-differential", text).group(1))
    assert plan.delta <= shown < plan.delta * 1.00001


# --- the file -------------------------------------------------------------------------------------------------------------


def test_it_is_valid_and_reads_back(statement, statistics):
    for made in (statement, build_statement(*statistics, ABOUT, NO_TUNING)):
        jsonschema.validate(json.loads(made.to_json()), json_schema())
        assert parse_statement(made.to_json()) == made


def test_the_committed_schema_is_current():
    """To renew it: json.dumps(dpformer.privacy.statement.json_schema(), indent=2), see docs/privacy.md."""
    assert json.loads(SCHEMA.read_text()) == json_schema()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"epsilon": -1}, "epsilon"),
        ({"delta": 2}, "delta"),
        ({"surprise": 1}, "surprise"),
        ({"private": False}, "private must be false"),
        ({"unit": None}, "unit"),
        ({"format": 1}, "format"),
        ({"data": {"catalogue": "guess"}}, "catalogue"),
        ({"noise": {"mode": "system", "generator": "", "grid": ""}}, "mode"),
    ],
)
def test_a_changed_statement_is_refused(statement, change, word):
    with pytest.raises(PrivacyError, match=word):
        parse_statement(json.dumps({**json.loads(statement.to_json()), **change}))


def test_a_seeded_run_is_marked_insecure_everywhere(run):
    seeded = build_statement(*run, Circumstances(LOG, seeded=True), NO_TUNING)
    assert seeded.noise.mode == "seeded"
    assert "OS entropy" not in seeded.text()
    assert len(seeded.insecure) == 1
    assert any("seed" in reason for reason in seeded.insecure)
    assert seeded.text().startswith("INSECURE")
    with pytest.raises(PrivacyError, match="insecure"):
        parse_statement(json.dumps({**json.loads(seeded.to_json()), "insecure": []}))


def test_a_run_without_privacy_says_so():
    free = build_statement(make_plan(100, math.inf, 1e-3, 10, steps=5), None, ABOUT, NO_TUNING)
    assert free.epsilon == "inf"
    assert not free.private
    assert free.noise.mode == "none"
    assert free.noise.grid == ""
    assert free.text().startswith("NOT PRIVATE")
    assert "differential privacy" not in free.text()
    assert free.attack.true_positive_rate == 1
    assert free.ledger is None
    jsonschema.validate(json.loads(free.to_json()), json_schema())


def test_tuning_is_accounted_or_listed(run, statement):
    plan, account = run
    paid = build_statement(*run, ABOUT, Tuning(10))
    assert paid.epsilon == paid.tuning.epsilon == tuned_epsilon(account.spent(), Tuning(10), plan.delta)
    assert paid.epsilon > statement.epsilon
    assert paid.attack.true_positive_rate > statement.attack.true_positive_rate
    assert paid.epsilon_at_delta_1_over_users == paid.epsilon
    assert "10 trials on average" in paid.text()
    with pytest.raises(PrivacyError, match="include the tuning"):
        parse_statement(json.dumps({**json.loads(paid.to_json()), "epsilon": statement.epsilon}))
    listed = TuningPart(kind="listed", configurations=("lr 1e-2", "lr 5e-3"))
    text = build_statement(*run, ABOUT, listed).text()
    assert "NOT accounted; 2 configurations" in text
    assert "lr 5e-3" in text
    with pytest.raises(ValueError, match="list the configurations"):
        TuningPart(kind="listed")
    with pytest.raises(ValueError, match="needs mean_trials"):
        TuningPart(kind="accounted", mean_trials=3)


def test_a_model_that_uses_earlier_runs_states_the_pair_of_all_of_them(run, tmp_path):
    """Poisson steps beside an earlier run with a threshold, counted again by dp_accounting."""
    plan, account = run
    earlier = make_plan(6040, 3, 1e-5, shares={"histogram": 1.0}, threshold_delta=1e-6)
    people_account = PeopleAccount.create(tmp_path / "people", Cap(20, 2e-5))
    for name, charged_plan in (("earlier", earlier), ("now", plan)):
        people_account.charge(RunCharge.of(name, name, charged_plan))
    about = replace(ABOUT, account=people_account.read(), prior=Conditions())
    made = build_statement(plan, account, about, NO_TUNING)
    counted = PLDAccountant(NEIGHBOURS, value_discretization_interval=1e-4)
    gaussians = [*earlier.releases, *plan.releases]
    for release in gaussians:
        counted.compose(dp_accounting.GaussianDpEvent(release.noise_multiplier))
    step = dp_accounting.PoissonSampledDpEvent(plan.rate, dp_accounting.GaussianDpEvent(plan.noise_multiplier))
    counted.compose(step, plan.steps)  # the whole plan: the account is charged before the run
    assert made.delta == 2e-5
    assert made.epsilon == made.account.epsilon == pytest.approx(counted.get_epsilon(2e-5 - 1e-6), rel=2e-3)
    at_users = counted.get_epsilon(1 / 6040 - 1e-6)
    assert made.epsilon_at_delta_1_over_users == pytest.approx(at_users, rel=2e-3)
    own = build_statement(plan, account, replace(about, prior=None), NO_TUNING)
    assert (made.alone.epsilon, made.alone.delta) == (own.epsilon, own.delta)
    assert own.alone is None
    assert made.attack.true_positive_rate > own.attack.true_positive_rate
    assert (made.releases, made.steps, made.budget) == (own.releases, own.steps, own.budget)
    jsonschema.validate(json.loads(made.to_json()), json_schema())
    assert parse_statement(made.to_json()) == made
    for missing in (replace(about, account=None), about):
        with pytest.raises(PrivacyError, match="one account of people"):
            build_statement(plan, account, missing, Tuning(3) if missing.account else NO_TUNING)


def test_thresholds_of_earlier_years_that_took_all_of_delta_leave_no_promise(run, tmp_path):
    plan, account = run
    earlier = make_plan(6040, 3, 1e-5, shares={"histogram": 1.0}, threshold_delta=9e-6)
    spending = Spending("id", Cap(20, 1.5e-5, "year"), (), ())
    runs = [RunCharge.of(str(year), "run", earlier, f"{year}") for year in (2024, 2025)]
    spending = replace(spending, runs=(*runs, RunCharge.of("now", "now", plan, "2026")), hashes=("", "", ""))
    made = build_statement(plan, account, replace(ABOUT, account=spending, prior=Conditions()), NO_TUNING)
    assert made.epsilon == "inf"
    assert made.private
    assert made.text().startswith("(inf, 1.5e-05)-differential privacy")
    assert parse_statement(made.to_json()) == made


def test_a_statement_needs_the_runs_own_ledger(run):
    plan, account = run
    with pytest.raises(PrivacyError, match="needs its ledger"):
        build_statement(plan, None, ABOUT, NO_TUNING)
    with pytest.raises(PrivacyError, match="another plan"):
        build_statement(make_plan(6040, 5, steps=50), account, ABOUT, NO_TUNING)


def test_everything_exported_exists_and_is_what_the_api_page_lists():
    assert len(dpformer.privacy.__all__) <= 15
    listed = re.findall(r"^::: (\S+)$", API.read_text(), re.M)
    exported = [getattr(dpformer.privacy, name) for name in dpformer.privacy.__all__]
    assert sorted(listed) == sorted(f"{value.__module__}.{value.__name__}" for value in exported)
    assert all(name.startswith("dpformer.privacy.") for name in listed)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dpformer.privacy.nonsense

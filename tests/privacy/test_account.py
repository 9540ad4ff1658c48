"""The account of people: composed as closed forms say, never above its cap, and never less than was charged."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from dpformer.errors import PrivacyError
from dpformer.privacy.account import Cap, PeopleAccount, Receipt, RunCharge, largest_epsilon, together
from dpformer.privacy.plan import make_plan

DELTA = 1e-5


def gaussian_epsilon(mu: float, delta: float) -> float:
    """delta = Phi(mu / 2 - eps / mu) - e^eps Phi(-mu / 2 - eps / mu), solved for eps."""

    def excess(eps: float) -> float:
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu)) - delta

    return brentq(excess, 0, mu * (mu / 2 + 40))


def mu_of(epsilon: float, delta: float = DELTA) -> float:
    return brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 1e-3, 50)


def statistics(epsilon: float, delta: float = DELTA, **more) -> RunCharge:
    """A run of statistics alone, such as the default preset."""
    plan = make_plan(1000, epsilon, delta, shares={"histogram": 0.03, "transitions": 0.97}, **more)
    return RunCharge.of(f"run-{epsilon}", "run", plan)


def runs(count: int, epsilon: float = 8.0) -> list[RunCharge]:
    return [statistics(epsilon)] * count


def charge(account: PeopleAccount, *epsilons: float) -> list[Receipt]:
    first = len(account.read().runs)
    made = [make_plan(1000, one, DELTA, shares={"histogram": 1.0}) for one in epsilons]
    return [account.charge(RunCharge.of(f"{first + n}", f"week-{first + n}", p)) for n, p in enumerate(made)]


# What several runs spend together


@pytest.mark.parametrize(("count", "expected"), [(1, 8.0), (2, 12.26), (4, 19.1), (52, 122.6)])
def test_runs_of_8_together(count, expected):
    spent = together(runs(count), DELTA)
    assert spent == pytest.approx(expected, rel=3e-3)
    assert spent == pytest.approx(gaussian_epsilon(math.sqrt(count) * mu_of(8), DELTA), rel=1e-5)


def test_52_releases_under_8():
    each = largest_epsilon((), Cap(8, DELTA), statistics(8), times=52)
    assert each == pytest.approx(0.85, abs=0.002)
    assert together(runs(52, each), DELTA) <= 8 < together(runs(52, each + 0.002), DELTA)


def test_unequal_runs_with_deltas_of_their_own():
    made = [statistics(3, 1e-6), statistics(5, 1e-7), statistics(1, 1e-5)]
    mu = math.sqrt(mu_of(3, 1e-6) ** 2 + mu_of(5, 1e-7) ** 2 + mu_of(1, 1e-5) ** 2)
    assert together(made, DELTA) == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-5)


def test_steps_compose_with_statistics():
    plan = make_plan(1000, 3, DELTA, 100, steps=20, shares={"histogram": 0.05})
    event = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.GaussianDpEvent(plan.releases[0].noise_multiplier / math.sqrt(2)),
            dp_accounting.GaussianDpEvent(1 / mu_of(2)),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(plan.noise_multiplier)), 40
            ),
        ]
    )
    neighbours = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    exact = PLDAccountant(neighbours, value_discretization_interval=2e-4).compose(event).get_epsilon(DELTA)
    spent = together([RunCharge.of("a", "a", plan), RunCharge.of("b", "b", plan), statistics(2)], DELTA)
    assert spent == pytest.approx(exact, rel=2e-3)


def test_thresholds_take_their_deltas_first():
    made = [statistics(2, threshold_delta=1e-6)] * 3
    noise = math.sqrt(3) * mu_of(2, 9e-6)
    assert together(made, DELTA) == pytest.approx(gaussian_epsilon(noise, 7e-6), rel=1e-5)
    assert together(made * 4, DELTA) == math.inf


# The cap


def test_what_would_exceed_the_cap_is_refused_and_what_fits_is_named(tmp_path):
    account = PeopleAccount.create(tmp_path / "people.account", Cap(8, DELTA))
    charge(account, 5, 2)
    before = (tmp_path / "people.account" / "ledger.jsonl").read_bytes()
    with pytest.raises(
        PrivacyError, match=r"cap of epsilon 8 .* spend 5\.\d+, .* this run's 6 .* epsilon [\d.]+ would fit"
    ) as caught:
        charge(account, 6)
    assert (tmp_path / "people.account" / "ledger.jsonl").read_bytes() == before
    fits = float(str(caught.value).split(". epsilon ")[1].split()[0])
    left = math.sqrt(mu_of(8) ** 2 - mu_of(5) ** 2 - mu_of(2) ** 2)
    assert fits == pytest.approx(gaussian_epsilon(left, DELTA), rel=5e-3)
    charge(account, fits)
    with pytest.raises(PrivacyError, match=r"would fit|nothing more fits"):
        charge(account, 0.5)
    assert together(account.read().runs, DELTA) <= 8


def test_an_account_whose_delta_may_publish_a_whole_user_is_refused(tmp_path):
    """The statement of a refitted run has the account's delta."""
    account = PeopleAccount.create(tmp_path / "a", Cap(8, 1e-3))
    for users, fits in ((999, True), (1000, False)):
        run = RunCharge.of(str(users), "run", make_plan(users, 1, DELTA, shares={"histogram": 1.0}))
        if fits:
            account.charge(run)
        else:
            with pytest.raises(PrivacyError, match="may publish a whole user"):
                account.charge(run)
    assert len(account.read().runs) == 1


def test_a_run_without_privacy_has_no_room():
    with pytest.raises(PrivacyError, match="no account has room"):
        RunCharge.of("a", "a", make_plan(1000, math.inf, DELTA, 100, steps=2))


@pytest.mark.parametrize(
    ("cap", "word"),
    [((0, DELTA), "epsilon 0"), ((math.inf, DELTA), "no cap"), ((8, 2), "delta 2"), ((8, DELTA, "week"), "per year")],
)
def test_a_wrong_cap_is_refused(cap, word):
    with pytest.raises(PrivacyError, match=word):
        Cap(*cap)


def test_a_cap_per_year_starts_again_and_the_years_add_up(tmp_path):
    time = ["2025-12-30T00:00:00+00:00"]
    PeopleAccount.create(tmp_path / "a", Cap(8, DELTA, "year"))
    account = PeopleAccount(tmp_path / "a", clock=lambda: time[0])
    charge(account, 8)
    with pytest.raises(PrivacyError, match="nothing more fits, or wait for the next year"):
        charge(account, 1)
    time[0] = "2026-01-02T00:00:00+00:00"
    charge(account, 8)
    for back in ("2025", "2024", "1999"):  # a clock that was set back gives no third year, an empty one neither
        time[0] = f"{back}-06-01T00:00:00+00:00"
        with pytest.raises(PrivacyError, match="next year"):
            charge(account, 1)
    spending = account.read()
    assert together(spending.runs, DELTA) == pytest.approx(12.26, rel=3e-3)
    assert together(spending.counted("2026"), DELTA) == pytest.approx(8, rel=1e-5)


# On disk


def test_a_run_is_charged_once_and_with_one_plan(tmp_path):
    account = PeopleAccount.create(tmp_path / "a", Cap(8, DELTA))
    first = account.charge(statistics(5))
    assert account.charge(statistics(5)) == first
    assert len(account.read().runs) == 1
    other = RunCharge.of("run-5", "run", make_plan(1000, 4, DELTA, shares={"histogram": 1.0}))
    with pytest.raises(PrivacyError, match="another plan"):
        account.charge(other)


def test_an_account_is_made_once_and_must_be_there(tmp_path):
    account = PeopleAccount.create(tmp_path / "a", Cap(8, DELTA))
    with pytest.raises(PrivacyError, match="exists already"):
        PeopleAccount.create(tmp_path / "a", Cap(8, DELTA))
    for use in (account.read, lambda: charge(account, 1)):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        with pytest.raises(PrivacyError, match="not an account of people; make one with"):
            use()


@pytest.mark.parametrize("damage", ["edit", "cut", "head"])
def test_a_changed_account_is_refused(tmp_path, damage):
    account = PeopleAccount.create(tmp_path / "a", Cap(8, DELTA))
    charge(account, 2, 2)
    path = tmp_path / "a" / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "edit":
        path.write_bytes(lines[0] + lines[1].replace(b'"epsilon":2', b'"epsilon":1') + lines[2])
    elif damage == "cut":
        path.write_bytes(b"".join(lines[:2]))
    else:
        (tmp_path / "a" / "ledger.head").unlink()
    for use in (account.read, lambda: charge(account, 1)):
        with pytest.raises(PrivacyError):
            use()


def test_a_torn_line_was_no_charge(tmp_path):
    account = PeopleAccount.create(tmp_path / "a", Cap(8, DELTA))
    charge(account, 2)
    with (tmp_path / "a" / "ledger.jsonl").open("ab") as file:
        file.write(b'{"run_id": "torn')
    charge(account, 2)
    assert [run.run_id for run in account.read().runs] == ["0", "1"]


def test_an_old_copy_is_known_by_the_receipts_of_later_runs(tmp_path):
    account = PeopleAccount.create(tmp_path / "a", Cap(8, DELTA))
    charge(account, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "old")
    (receipt,) = charge(account, 2)
    shutil.rmtree(tmp_path / "a")
    shutil.move(tmp_path / "old", tmp_path / "a")
    assert len(account.read().runs) == 1, "without a receipt nothing tells"
    new = RunCharge.of("new", "new", make_plan(1000, 3, DELTA, shares={"histogram": 1.0}))
    for use in (lambda: account.read(receipt, "runs/b"), lambda: account.charge(new, [("runs/b", receipt)])):
        with pytest.raises(PrivacyError, match="not number 2, which runs/b has a receipt for: it is an old copy"):
            use()
    charge(account, 2.5)  # a forked account: another charge 2
    with pytest.raises(PrivacyError, match="old copy"):
        account.read(receipt)


WRITER = """
import sys
from dpformer.errors import PrivacyError
from dpformer.privacy.account import PeopleAccount, RunCharge
from dpformer.privacy.plan import make_plan

account, refused = PeopleAccount(sys.argv[1]), 0
for n in range(6):
    try:
        account.charge(RunCharge.of(f"{sys.argv[2]}-{n}", "run", make_plan(1000, 2, 1e-5, shares={"histogram": 1.0})))
    except PrivacyError as error:
        assert "cap of epsilon" in str(error), error
        refused += 1
print(refused)
"""


def test_a_statement_is_not_made_of_another_account(tmp_path):
    """An account that was made again at the same place, or another one, says less than the run's own spent."""
    (receipt,) = charge(PeopleAccount.create(tmp_path / "a", Cap(8.0)), 6)
    other = PeopleAccount.create(tmp_path / "b", Cap(8.0))
    charge(other, 0.1)
    with pytest.raises(PrivacyError, match="give the account that the run was charged to"):
        other.read().upto(receipt)


def test_writers_at_once_wait_for_each_other(tmp_path):
    PeopleAccount.create(tmp_path / "a", Cap(6, DELTA))
    most = int((mu_of(6) / mu_of(2)) ** 2)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "a", name], stdout=subprocess.PIPE, text=True)
        for name in "xy"
    ]
    refused = sum(int(writer.communicate(timeout=300)[0]) for writer in writers)
    spending = PeopleAccount(tmp_path / "a").read()
    assert len(spending.runs) == most == 12 - refused
    assert together(spending.runs, DELTA) <= 6
    assert len({run.run_id for run in spending.runs}) == most


def test_it_holds_counts_and_no_people(tmp_path):
    account = PeopleAccount.create(tmp_path / "a", Cap(8, DELTA))
    charge(account, 2)
    line = json.loads(Path(tmp_path / "a" / "ledger.jsonl").read_text().splitlines()[1])
    assert set(line) == {
        *("run_id", "name", "time", "users", "epsilon", "delta", "charges", "threshold_delta", "n", "previous", "hash")
    }

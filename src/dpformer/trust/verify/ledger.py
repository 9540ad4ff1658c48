"""Do ledger, statement and account agree with each other, and with a second count? No data and no training is needed for this."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import dp_accounting
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from dpformer.artifact import read_config
from dpformer.artifact.layout import LOCAL
from dpformer.data.split import trained_on
from dpformer.files import read_json
from dpformer.fit.prior import read_prior
from dpformer.fit.recipe import Recipe
from dpformer.fit.stated import assumptions
from dpformer.privacy import PrivacyStatement, read_ledger
from dpformer.privacy.account import PeopleAccount
from dpformer.privacy.accounting import Charge, rdp_epsilon
from dpformer.privacy.build import Conditions, inherited
from dpformer.privacy.statement import NoisePart
from dpformer.privacy.wording import GENERATORS, GRID, NEIGHBOURS, SEEDED, UNIT
from dpformer.trust.verify.checks import NotChecked, Outcome, agreement

ROOM = 2e-3
"""Relative room between two counts of the same thing: PLD's grid."""


def ledger_against_statement(folder: Path, statement: PrivacyStatement, recipe: Recipe) -> Outcome:
    """Everything that the statement says was done must stand in a sound ledger, and nothing less."""
    if not statement.private:
        raise NotChecked("the run is not private and says so: it has no ledger")
    account = read_ledger(folder)  # raises where a line was changed, moved or cut off behind the head
    plan, said, steps = account.plan, statement.ledger, statement.steps
    names, prior = [entry.name for entry in account.entries], read_prior(folder)
    of_prior = Conditions() if prior is None else prior.conditions
    mode: Literal["exact", "seeded"] = "exact" if recipe.seed is None else "seeded"
    pairs: dict[str, tuple[object, object]] = {
        "run": (account.run_id, said and said.run_id),
        "entries": (account.position.entries, said and said.entries),
        "hash of the last entry": (account.position.hash, said and said.hash),
        "order of the answers": (names, [plan.planned(place).name for place in range(len(names))]),
        "users": (plan.users, statement.users),
        "releases": (
            {r.name: r.noise_multiplier for r in plan.releases if r.name in account.released},
            {r.name: r.noise_multiplier for r in statement.releases},
        ),
        "delta": (plan.delta, (statement.alone or statement).delta),
        "delta of a threshold": (plan.threshold_delta, statement.data.threshold_delta),
        "budget": (plan.epsilon, statement.budget),
        "recipe's epsilon": (plan.epsilon, recipe.epsilon),
        "recipe's delta": (plan.delta, recipe.delta),
        "unit": (UNIT, statement.unit),
        "neighbours": (NEIGHBOURS, statement.neighbours),
        "noise": (NoisePart(mode=mode, generator=GENERATORS[mode], grid=GRID), statement.noise),
        "marked insecure": (
            inherited((SEEDED,) if recipe.seed is not None else (), of_prior.insecure),
            statement.insecure,
        ),
        "assumed public by earlier runs": (
            inherited(statement.assumed_public, of_prior.assumed_public),
            statement.assumed_public,
        ),
        "trained on": (trained_on(recipe.hold_out, read_config(folder)["log"].get("date")), statement.data.trained_on),
        "steps": (bool(plan.steps), steps is not None),
        "assumptions": (assumptions(plan), statement.assumptions),
        "prior of earlier runs": (prior is not None, statement.alone is not None),
    }
    if steps is not None:
        pairs |= {
            "steps charged": (account.steps_charged, steps.charged),
            "steps planned": (plan.steps, steps.planned),
            "expected batch": (plan.batch_size, steps.expected_batch_size),
            "sampler": (plan.sampler, steps.sampler),
            "sampling rate": (plan.rate, steps.sampling_rate),
            "noise multiplier": (plan.noise_multiplier, steps.noise_multiplier),
        }
    return agreement(pairs, f"{account.position.entries} entries, an unbroken chain; {len(pairs)} facts agree")


def recount(statement: PrivacyStatement) -> Outcome:
    """Epsilon counted again from what the statement says was done, by code of its own.

    A threshold takes a part of delta. Gaussian releases alone have a closed form. Else the stated epsilon must lie between a
    recount by PLD (tight, but for its grid) and RDP, another theory, whose epsilon is never below the truth.
    """
    if not statement.private:
        raise NotChecked("the run is not private and says so: epsilon is inf")
    if statement.tuning.kind == "accounted":
        raise NotChecked("epsilon includes accounted tuning, for which there is one accountant only (RDP)")
    charges = [Charge(release.name, release.noise_multiplier) for release in statement.releases]
    if (steps := statement.steps) is not None:
        charges.append(Charge("steps", steps.noise_multiplier, steps.sampling_rate, steps.charged))
    alone = statement.alone or statement
    stated = {alone.delta: float(alone.epsilon)}
    if statement.alone is None:  # else it is of the account, which has a check of its own
        stated[1 / statement.users] = float(statement.epsilon_at_delta_1_over_users)
    lines, good = [], True
    for delta, value in stated.items():
        fits, how = _fits(value, charges, delta - statement.data.threshold_delta)
        good &= fits
        lines.append(f"at delta {delta:.3g}: stated {value:.4f}, {how}")
    return Outcome(good, "; ".join(lines))


def account_against_run(folder: Path, statement: PrivacyStatement) -> Outcome:
    """The line of the account that the ledger begins with is this run's whole plan, and the statement's total is the sum.

    The ledger's header holds the hash of that line, and each line of the ledger the hash of the one before: so the account was
    charged before the first answer.
    """
    said = statement.account
    assert said is not None
    ledger = read_ledger(folder)
    receipt, plan = ledger.receipt, ledger.plan
    if receipt is None:
        return Outcome(False, "the statement has an account, and the ledger does not begin with a receipt of one")
    local = read_json(folder / LOCAL) if (folder / LOCAL).exists() else {}
    if not Path(local.get("account", "nowhere")).exists():
        raise NotChecked("the account is not where it was when the run began")
    spending = PeopleAccount(local["account"]).read().upto(receipt, str(folder))
    line, cap = spending.runs[-1], spending.cap
    pairs: dict[str, tuple[object, object]] = {
        f"charge {receipt.entries} of the account is not this run's plan": (
            (ledger.run_id, plan.charges(), plan.threshold_delta),
            (line.run_id, line.charges, line.threshold_delta),
        ),
        "receipt": ((receipt.account, receipt.entries, receipt.hash), (said.id, said.runs, said.hash)),
        "cap": ((cap.epsilon, cap.delta, bool(cap.per)), (said.cap, said.delta, bool(said.period))),
    }
    counts = [
        ("in all", spending.runs, said.epsilon, cap.delta),
        ("against the cap", spending.counted(line.time), said.epsilon_in_period, cap.delta),
    ]
    if statement.alone is not None:  # the model uses earlier runs, so its pair is of all of them
        counts += [("what counts for the model", spending.runs, statement.epsilon, statement.delta)]
        counts += [("at delta 1/users", spending.runs, statement.epsilon_at_delta_1_over_users, 1 / statement.users)]
    lines = [f"charge {receipt.entries}"]
    for what, runs, stated, delta in counts:
        left = delta - sum(run.threshold_delta for run in runs)
        fits, how = _fits(float(stated), [charge for run in runs for charge in run.charges], left)
        lines.append(f"{what} {how}")
        if not fits:
            pairs[what] = (how, f"{float(stated):.4f}")
    return agreement(pairs, "; ".join(lines))


def _fits(stated: float, charges: Sequence[Charge], delta: float) -> tuple[bool, str]:
    """Whether a stated epsilon is what charges can have at `delta`, and how that was counted."""
    low, high, how = interval(tuple(charges), delta)
    return low * (1 - ROOM) <= stated <= high * (1 + ROOM), how


@functools.lru_cache(maxsize=64)
def interval(charges: tuple[Charge, ...], delta: float) -> tuple[float, float, str]:
    """The least and the largest epsilon that charges can have at `delta`, and how they were counted."""
    gaussian = [one for one in charges if one.rate == 1 and one.times]
    poisson = [one for one in charges if one.rate < 1 and one.times]
    if not poisson:
        value = gaussian_epsilon(math.sqrt(sum(one.times * one.noise_multiplier**-2 for one in gaussian)), delta)
        return value, value, f"closed form {value:.4f}"
    events = [dp_accounting.GaussianDpEvent(one.noise_multiplier / math.sqrt(one.times)) for one in gaussian]
    for one in poisson:
        step = dp_accounting.PoissonSampledDpEvent(one.rate, dp_accounting.GaussianDpEvent(one.noise_multiplier))
        events.append(dp_accounting.SelfComposedDpEvent(step, one.times))
    event = dp_accounting.ComposedDpEvent(events)
    rdp = rdp_epsilon(event, delta)
    # The number of users stays, and one user's events are replaced by none.
    neighbours = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    pld = PLDAccountant(neighbours, value_discretization_interval=max(2e-4, 1e-4 * rdp)).compose(event)
    return (low := float(pld.get_epsilon(delta))), rdp, f"PLD {low:.4f}, RDP {rdp:.4f}"


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Solve delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), the curve of a mu-GDP mechanism, for epsilon."""
    if mu == 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    return float(brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0.0, mu * (mu / 2 + 40)))


def gaussian_delta(mu: float, eps: float) -> float:
    """delta(eps) of a mu-GDP mechanism."""
    return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu)))

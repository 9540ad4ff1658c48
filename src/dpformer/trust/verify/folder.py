"""Do the files of a run agree with each other, and with a second count? No data and no training is needed for this."""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import dp_accounting
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from dpformer.artifact import read_config
from dpformer.artifact.layout import PRIOR
from dpformer.data.split import trained_on
from dpformer.fit.recipe import Recipe
from dpformer.fit.stated import assumptions
from dpformer.privacy import PrivacyStatement, read_ledger
from dpformer.privacy.accounting import Charge, rdp_epsilon
from dpformer.privacy.statement import NoisePart
from dpformer.privacy.wording import GENERATORS, GRID, NEIGHBOURS, UNIT
from dpformer.trust.verify.checks import NotChecked, Outcome

ROOM = 2e-3
"""Relative room between two counts of the same thing: PLD's grid."""

PICKLE_NAMES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill")


def ledger_against_statement(folder: Path, statement: PrivacyStatement, recipe: Recipe) -> Outcome:
    """Everything that the statement says was done must stand in a sound ledger, and nothing less."""
    if not statement.private:
        raise NotChecked("the run is not private and says so: it has no ledger")
    account = read_ledger(folder)  # raises where a line was changed, moved or cut off behind the head
    plan, said, steps = account.plan, statement.ledger, statement.steps
    releases = {r.name: r.noise_multiplier for r in plan.releases if r.name in account.released}
    names = [entry.name for entry in account.entries]
    mode: Literal["exact", "seeded"] = "exact" if recipe.seed is None else "seeded"
    pairs: dict[str, tuple[object, object]] = {
        "run": (account.run_id, said and said.run_id),
        "entries": (account.position.entries, said and said.entries),
        "hash of the last entry": (account.position.hash, said and said.hash),
        "order of the answers": (names, [plan.planned(place).name for place in range(len(names))]),
        "users": (plan.users, statement.users),
        "releases": (releases, {r.name: r.noise_multiplier for r in statement.releases}),
        "delta": (plan.delta, (statement.alone or statement).delta),
        "delta of a threshold": (plan.threshold_delta, statement.data.threshold_delta),
        "budget": (plan.epsilon, statement.budget),
        "recipe's epsilon": (plan.epsilon, recipe.epsilon),
        "recipe's delta": (plan.delta, recipe.delta),
        "unit": (UNIT, statement.unit),
        "neighbours": (NEIGHBOURS, statement.neighbours),
        "noise": (NoisePart(mode=mode, generator=GENERATORS[mode], grid=GRID), statement.noise),
        "marked insecure": (recipe.seed is not None, bool(statement.insecure)),
        "trained on": (trained_on(recipe.hold_out, read_config(folder)["log"].get("date")), statement.data.trained_on),
        "steps": (bool(plan.steps), steps is not None),
        "assumptions": (assumptions(plan), statement.assumptions),
        "prior of earlier runs": ((folder / PRIOR).exists(), statement.alone is not None),
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
    wrong = [f"{name}: {a!r} by the run, {b!r} stated" for name, (a, b) in pairs.items() if a != b]
    figures = {"entries": account.position.entries, "stated": said.entries if said else None, "differences": wrong}
    if wrong:
        return Outcome(False, "; ".join(wrong), figures)
    return Outcome(True, f"{account.position.entries} entries, an unbroken chain; {len(pairs)} facts agree", figures)


def recount(statement: PrivacyStatement) -> Outcome:
    """Epsilon counted again from what the statement says was done, by code of its own.

    A threshold takes a part of delta. Gaussian releases alone have a closed form. Else the
    stated epsilon must lie between a recount by PLD (tight, but for its grid) and RDP, another theory, whose epsilon is never
    below the truth.
    """
    if not statement.private:
        raise NotChecked("the run is not private and says so: epsilon is inf")
    if statement.tuning.kind == "accounted":
        raise NotChecked("epsilon includes accounted tuning, for which there is one accountant only (RDP)")
    threshold = statement.data.threshold_delta
    alone = statement.alone or statement
    stated = {alone.delta: float(alone.epsilon)}
    if statement.alone is None:  # else it is of the account, which has a check of its own
        stated[1 / statement.users] = float(statement.epsilon_at_delta_1_over_users)
    lines, figures, good = [], {}, True
    for delta, value in stated.items():
        low, high, how = interval(_charges(statement), delta - threshold)
        good &= low * (1 - ROOM) <= value <= high * (1 + ROOM)
        lines.append(f"at delta {delta:.3g}: stated {value:.4f}, {how}")
        figures[f"{delta:g}"] = {"stated": value, "low": low, "high": high}
    return Outcome(good, "; ".join(lines), figures)


def _charges(statement: PrivacyStatement) -> list[Charge]:
    charges = [Charge(release.name, release.noise_multiplier) for release in statement.releases]
    if (steps := statement.steps) is not None:
        charges.append(Charge("steps", steps.noise_multiplier, steps.sampling_rate, steps.charged))
    return charges


def interval(charges: Sequence[Charge], delta: float) -> tuple[float, float, str]:
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
    if mu == 0:
        return 0.0

    def excess(eps: float) -> float:
        return gaussian_delta(mu, eps) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu * (mu / 2 + 40)))


def gaussian_delta(mu: float, eps: float) -> float:
    """delta(eps) of a mu-GDP mechanism."""
    return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu)))


def no_pickle(folder: Path) -> Outcome:
    """No file of the folder is a pickle or holds one, whatever it is called: loading a pickle runs its code."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    bad = [str(path.relative_to(folder)) for path in files if holds_pickle(path)]
    detail = f"holds pickled objects: {', '.join(bad)}" if bad else f"{len(files)} files, none of them"
    return Outcome(not bad, detail, {"files": len(files), "pickles": bad})


def holds_pickle(path: Path) -> bool:
    """By suffix, by content as a pickle of any protocol, as a zip of torch or numpy that holds one, as an array of objects."""
    if path.suffix.lower() in PICKLE_NAMES:
        return True
    with open(path, "rb") as file:
        head = file.read(128)
        if head.startswith(b"\x93NUMPY"):
            return b"'|O" in head
        file.seek(0)
        try:
            for _ in pickletools.genops(file):
                pass  # reads opcodes, runs none
            return True
        except (ValueError, EOFError, KeyError, IndexError, OverflowError, MemoryError):
            pass
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith((".pkl", ".pickle")) for name in archive.namelist())
    return False

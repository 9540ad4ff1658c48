"""`dpformer plan`: what `fit` would do with the same options, before anything is spent; `fit --dry-run` prints the same."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from dpformer.cli.options import AccountFolder, AsJson, account_of, chooses_recipe
from dpformer.cli.output import print_json, stdout
from dpformer.errors import PrivacyError

if TYPE_CHECKING:
    from dpformer.data import Dataset
    from dpformer.fit.recipe import Recipe
    from dpformer.privacy import PrivacyPlan
    from dpformer.privacy.account import Cap, PeopleAccount, RunCharge

ACCOUNTANTS = {"pld": "PLD", "rdp": "RDP", "gaussian": "the closed form for Gaussians"}
# NDCG@10 in percent by preset, data set and epsilon, at delta 1e-5: figures of docs/results, with which a test compares them.
MEASURED: dict[str, dict[str, dict[float, float]]] = {
    "default": {
        "ml-1m": {1: 6.39, 2: 8.71, 3: 10.24, 5: 11.8, 8: 13.13, 10: 13.48},
        "amazon-games": {1: 2.07, 2: 2.9, 3: 3.46, 5: 4.18, 8: 4.64, 10: 4.89},
    },
    "distilled": {
        "ml-1m": {1: 6.93, 2: 9.03, 3: 10.41, 5: 11.83, 8: 13.15, 10: 13.69},
        "amazon-games": {1: 1.96, 2: 2.71, 3: 3.31, 5: 3.98, 8: 4.52, 10: 4.74},
    },
}


@chooses_recipe
def plan(
    data: Annotated[
        Path | None, Argument(help="A folder made by `dpformer prepare`; or give --population instead.")
    ] = None,
    account: AccountFolder = None,
    weekly: Annotated[int | None, Option(min=1, help="Divide --total among so many runs on the same people.")] = None,
    total: Annotated[float | None, Option(help="With --weekly: epsilon of all these runs together.")] = None,
    as_json: AsJson = False,
    *,
    recipe: functools.partial[Any],
) -> None:
    """Plan what `fit` would do with the same options: noise, steps, what epsilon means, what the account has left."""
    if (weekly is None) != (total is None):
        raise PrivacyError("--weekly and --total go together: so many runs, and the epsilon of all of them")
    if weekly is not None and "epsilon" in recipe.keywords:
        raise PrivacyError("--weekly computes the epsilon of each run; leave out --epsilon")
    chosen = recipe() if total is None else recipe(epsilon=total)
    figures: dict[str, Any] = {}
    if weekly is not None:
        figures["weekly"] = _each(chosen, data, weekly)
        chosen = chosen.changed({"epsilon": figures["weekly"]["epsilon"]})
    if data is not None or chosen.population is not None:
        figures |= planned(chosen, data, account_of(account))
    elif weekly is None:
        raise PrivacyError("the number of users is not known; give a folder made by dpformer prepare, or --population")
    show(figures, as_json)


def _each(recipe: Recipe, data: Path | None, times: int) -> dict[str, Any]:
    """The epsilon that each of `times` runs may have, with what was measured near it."""
    from dpformer.privacy.account import Cap, RunCharge, largest_epsilon

    total, delta = recipe.epsilon, recipe.delta
    cap = Cap(total, delta)
    if data is not None or recipe.population is not None:
        shape = RunCharge.of("", "", _plan_of(recipe, data)[0])
    elif recipe.steps_on_data:
        raise PrivacyError(
            "steps on a sample depend on the number of users: give a prepared folder or --population, or take a preset without "
            "steps, such as distilled"
        )
    else:
        shape = one_gaussian(cap)
    each = largest_epsilon((), cap, shape, times)
    if not each:
        raise PrivacyError(
            f"{times} runs do not fit into epsilon {total:g} at delta {delta:g}; raise --total or --delta"
        )
    return {"runs": times, "total": total, "delta": delta, "epsilon": each, "measured": _measured(recipe, each)}


def one_gaussian(cap: Cap) -> RunCharge:
    """A run of the cap's epsilon by statistics over all users, which are one Gaussian, however many users there are."""
    from dpformer.privacy import Charge
    from dpformer.privacy.account import RunCharge
    from dpformer.privacy.calibration import gaussian_multiplier

    charge = Charge("answers", gaussian_multiplier(cap.epsilon, cap.delta))
    return RunCharge("", "", "", 0, cap.epsilon, cap.delta, (charge,))


def _plan_of(recipe: Recipe, data: Path | None) -> tuple[PrivacyPlan, Dataset | None]:
    """The plan that `fit` would follow on this data; without data, for the recipe's population."""
    from dpformer.data import load

    dataset = None if data is None else load(data)
    users = len(dataset.sequences) if dataset is not None else recipe.population or 0
    return recipe.plan(users, dataset is not None and dataset.catalogue_mode == "private"), dataset


def planned(recipe: Recipe, data: Path | None, account: PeopleAccount | None = None) -> dict[str, Any]:
    """All figures, ready for JSON, in the order in which they are shown."""
    from dpformer.privacy import attack_bound, epsilon
    from dpformer.privacy.plan import spending

    plan, dataset = _plan_of(recipe, data)
    attack = attack_bound(plan.charges(), plan.delta, threshold_delta=plan.threshold_delta)
    return {
        "users": plan.users,
        "items": None if dataset is None else len(dataset.catalogue),
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "threshold_delta": plan.threshold_delta,
        "releases": [asdict(release) for release in plan.releases],
        "steps": plan.steps,
        "noise_multiplier": plan.noise_multiplier,
        "batch_size": plan.batch_size,
        "sampler": plan.sampler,
        "sampling_rate": plan.rate,
        "spent": asdict(plan.total),
        "epsilon_at_delta_1_over_users": epsilon(plan.charges(), 1 / plan.users, plan.threshold_delta).epsilon,
        "epsilon_after": spending(plan) if plan.steps else {},
        "attack": {**asdict(attack), "reading": attack.sentence()},
        "estimate": _estimate(recipe, plan, dataset) if plan.steps and dataset is not None else None,
        "measured": _measured(recipe, plan.epsilon),
        "account": None if account is None else _with_account(plan, account),
    }


def _with_account(plan: PrivacyPlan, account: PeopleAccount) -> dict[str, Any]:
    from dpformer.privacy.account import RunCharge, largest_epsilon, now, together

    spending = account.read()
    counted, run = spending.counted(now()), RunCharge.of("", "", plan)
    total = together((*counted, run), spending.cap.delta)
    return {
        "path": str(account.folder),
        "cap": asdict(spending.cap),
        "runs": len(counted),
        "spent": together(counted, spending.cap.delta),
        "with_this_run": total,
        "fits": total <= spending.cap.epsilon * (1 + 1e-9),
        "largest_epsilon": largest_epsilon(counted, spending.cap, run),
    }


def _estimate(recipe: Recipe, plan: PrivacyPlan, dataset: Dataset) -> dict[str, Any]:
    """Time and memory of the steps, from a micro-batch timed on this machine."""
    from dpformer.fit.estimate import estimate

    assert recipe.network is not None
    network = recipe.network.model_copy(update={"vocabulary": None})
    items = min(len(dataset.catalogue), recipe.network.vocabulary or math.inf)
    mean = len(dataset.sequences.items) / len(dataset.sequences)
    cost = estimate(network, int(items), plan.batch_size, max(1, round(min(mean, network.max_length))))
    return {**asdict(cost), "training_seconds": cost.seconds * plan.steps}


def _measured(recipe: Recipe, epsilon: float) -> dict[str, dict[str, float]]:
    """NDCG@10 in percent at the measured epsilons around this one, by data set; empty for recipes that were not measured."""
    from dpformer.fit.presets import command

    asked = command(recipe)
    if set(asked["set"]) - {"seed", "population", "tuning", "tuning.kind"}:
        return {}
    near: dict[str, dict[str, float]] = {}
    for name, figures in MEASURED.get(asked["preset"], {}).items():
        at = [e for e in figures if e <= epsilon][-1:] + [e for e in figures if e > epsilon][:1]
        near[name] = {f"{e:g}": figures[e] for e in at}
    return near


def show(figures: dict[str, Any], as_json: bool) -> None:
    """Print the figures, for people or as JSON."""
    if as_json:
        print_json(_finite(figures))
        return
    if w := figures.get("weekly"):
        stdout.print(
            f"{w['runs']} runs on the same people, together epsilon {w['total']:g} at delta {w['delta']:g}: each may have "
            f"epsilon [bold]{w['epsilon']:g}[/] (at the same delta)",
            soft_wrap=True,
        )
    if "users" in figures:
        facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, text in _facts(figures).items():
            facts.add_row(name, text)
        stdout.print(facts)
        stdout.print(f"\n{figures['attack']['reading']}\n", soft_wrap=True)
    stdout.print(_accuracy(figures.get("measured", figures.get("weekly", {}).get("measured"))), soft_wrap=True)


def _facts(f: dict[str, Any]) -> dict[str, str]:
    from dpformer.privacy.wording import round_up

    budget = f"epsilon {f['epsilon']:g}, delta {f['delta']:g}" if math.isfinite(f["epsilon"]) else "none: NOT PRIVATE"
    facts = {"users": f"{f['users']:,}" + (f", {f['items']:,} items" if f["items"] else ""), "budget": budget}
    for release in f["releases"]:
        facts[f"answer {release['name']}"] = f"once, noise multiplier {release['noise_multiplier']:.4g}"
    if f["steps"]:
        how = "all users" if f["sampler"] == "full" else f"Poisson, each user with {f['sampling_rate']:.5g}"
        noise = f"noise multiplier {f['noise_multiplier']:.4g}"
        facts["steps"] = f"{f['steps']:,} of {f['batch_size']:,} users expected ({how}), {noise}"
    spent = f["spent"]
    facts["spent in the end"] = (
        f"epsilon {spent['epsilon']:.4g} by {ACCOUNTANTS[spent['accountant']]}; cross-check by RDP {spent['rdp']:.4g}; "
        f"at delta 1/users {f['epsilon_at_delta_1_over_users']:.4g} {spent['note']}".rstrip()
    )
    if f["epsilon_after"]:
        facts["epsilon after step"] = ", ".join(f"{step:,}: {e:.3g}" for step, e in f["epsilon_after"].items())
    if e := f["estimate"]:
        facts["time and memory"] = (
            f"{e['seconds']:.3g} s per step, {e['training_seconds'] / 60:,.1f} min for all steps, "
            f"{'' if e['whole'] else 'at least '}{e['memory_bytes'] / 2**20:,.0f} MB; timed here on {e['timed_tokens']:,} of "
            f"{e['tokens_per_step']:,} tokens of a step, without noise, update and statistics"
        )
    if a := f["account"]:
        cap = f"{a['cap']['epsilon']:g} at delta {a['cap']['delta']:g}{' per year' if a['cap']['per'] else ''}"
        fits = "fits" if a["fits"] else f"[bold]does not fit[/]: epsilon {a['largest_epsilon']:g} would"
        spent, total = (round_up(a[name], 4) for name in ("spent", "with_this_run"))
        facts["account"] = f"cap {cap}; {a['runs']} runs spent {spent:.4g}; with this one {total:.4g}, which {fits}"
    return facts


def _accuracy(near: dict[str, dict[str, float]] | None) -> str:
    if not near:
        return "accuracy to expect: not measured for these settings"
    sets = []
    for name, figures in near.items():
        sets.append(f"{name} " + ", ".join(f"{value:g} at epsilon {e}" for e, value in figures.items()))
    return f"accuracy measured with this preset (NDCG@10 in percent, test item): {'; '.join(sets)}. Yours depends on the data"


def _finite(value: Any) -> Any:
    """For JSON, which has no number for infinity."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value

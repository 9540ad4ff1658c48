"""`dpformer plan`: what `fit` would do with the same options, before anything is spent."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpformer.cli.options import AccountFolder, account_of, chooses_recipe

if TYPE_CHECKING:
    from dpformer.fit.recipe import Recipe


@chooses_recipe
def plan(
    data: Annotated[
        Path | None, typer.Argument(help="A folder made by `dpformer prepare`; or give --population instead.")
    ] = None,
    account: AccountFolder = None,
    weekly: Annotated[
        int | None, typer.Option(min=1, help="Divide --total among so many runs on the same people.")
    ] = None,
    total: Annotated[float | None, typer.Option(help="With --weekly: epsilon of all these runs together.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
    *,
    recipe: "functools.partial[Any]",
) -> None:
    """Plan what `fit` would do with the same options: noise, steps, what epsilon means, what the account has left."""
    from dpformer.cli.plan_report import planned, show
    from dpformer.errors import PrivacyError

    if (weekly is None) != (total is None):
        raise PrivacyError("--weekly and --total go together: so many runs, and the epsilon of all of them")
    if weekly is not None and "epsilon" in recipe.keywords:
        raise PrivacyError("--weekly computes the epsilon of each run; leave out --epsilon")
    chosen = recipe() if total is None else recipe(epsilon=total)
    figures: dict[str, Any] = {}
    if weekly is not None:
        chosen, figures["weekly"] = _each(chosen, data, weekly)
    if data is not None or chosen.population is not None:
        figures |= planned(chosen, data, account_of(account))
    elif weekly is None:
        raise PrivacyError("the number of users is not known; give a folder made by dpformer prepare, or --population")
    show(figures, as_json)


def _each(recipe: "Recipe", data: Path | None, times: int) -> "tuple[Recipe, dict[str, Any]]":
    """The recipe with the epsilon that each of `times` runs may have, and the figures."""
    from dpformer.cli.plan_report import measured, plan_of
    from dpformer.errors import PrivacyError
    from dpformer.privacy import Charge
    from dpformer.privacy.account import Cap, RunCharge, largest_epsilon
    from dpformer.privacy.calibration import gaussian_multiplier

    total, delta = recipe.epsilon, recipe.delta
    cap = Cap(total, delta)
    if data is not None or recipe.population is not None:
        shape = RunCharge.of("", "", plan_of(recipe, data)[0])
    elif recipe.steps_on_data:
        raise PrivacyError("steps on a sample depend on the number of users: give a prepared folder, or --population")
    else:  # statistics over all users are one Gaussian, however many users there are
        shape = RunCharge("", "", "", 0, total, delta, (Charge("answers", gaussian_multiplier(total, delta)),))
    each = largest_epsilon((), cap, shape, times)
    if not each:
        raise PrivacyError(
            f"{times} runs do not fit into epsilon {total:g} at delta {delta:g}; raise --total or --delta"
        )
    figures = {"runs": times, "total": total, "delta": delta, "epsilon": each, "measured": measured(recipe, each)}
    return recipe.changed({"epsilon": each}), figures

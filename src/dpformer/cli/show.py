"""`dpformer show`: what a run is, what it has spent, what it promises."""

from pathlib import Path
from typing import Annotated

import typer


def show(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """Show a run: its state, its budget, its settings, its privacy statement."""
    import json

    from dpformer.cli.output import print_json, stdout
    from dpformer.privacy import epsilon, read_ledger
    from dpformer.training.files import read_json
    from dpformer.training.folder import CONFIG, MODEL, check_files, read_recipe
    from dpformer.training.released import read_statement

    recipe = read_recipe(run)
    if finished := (run / MODEL).is_file():
        check_files(run)
    config = read_json(run / CONFIG)
    found = {"run": str(run), "finished": finished, "items": config.get("items", 0), "recipe": config["recipe"]}
    if (run / "ledger.jsonl").exists():
        account = read_ledger(run)
        charged = epsilon(account.spent(), account.plan.delta).epsilon if account.entries else 0.0
        found["spent"] = {"epsilon": charged, "of": account.plan.epsilon, "delta": account.plan.delta}
        found["steps"] = {"charged": account.steps_charged, "planned": account.plan.steps}
    statement = read_statement(run) if finished else None
    if as_json:
        print_json(found | ({"privacy": json.loads(statement.to_json())} if statement else {}))
        return
    state = "finished" if finished else f"unfinished: go on with `dpformer resume {run}`"
    stdout.print(f"{run}: {recipe.model} over {found['items']:,} items, {state}", markup=False, soft_wrap=True)
    if "spent" in found:
        spent, steps = found["spent"], found["steps"]
        stdout.print(
            f"charged: {steps['charged']} of {steps['planned']} steps, epsilon {spent['epsilon']:.3f} of {spent['of']:g} "
            f"at delta {spent['delta']:g}",
            soft_wrap=True,
        )
    if statement is not None:
        stdout.print(statement.text(), markup=False, soft_wrap=True)

"""`dpformer show`: what a run is, what it has spent, what it promises."""

from pathlib import Path
from typing import Annotated, Any

import typer


def show(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """Show a run: its state, its budget, its settings, its privacy statement."""
    import json

    from dpformer.artifact import (
        check_files,
        check_version,
        read_config,
        read_spec,
        read_statement,
        refuse_unfinished,
    )
    from dpformer.artifact.layout import LEDGER
    from dpformer.cli.output import print_json, stdout
    from dpformer.privacy import epsilon, read_ledger

    config = read_config(run)
    if config.get("version") == 1:
        _show_old(run, config, as_json)
        return
    check_version(run, config)
    refuse_unfinished(run)
    check_files(run)
    spec = read_spec(run)
    shown: dict[str, Any] = {"run": str(run), "finished": True, "items": spec.items, "recipe": config["recipe"]}
    if (run / LEDGER).exists():
        account = read_ledger(run)
        plan = account.plan
        charged = epsilon(account.spent(), plan.delta, plan.threshold_delta).epsilon if account.entries else 0.0
        shown["spent"] = {"epsilon": charged, "of": plan.epsilon, "delta": plan.delta}
        shown["steps"] = {"charged": account.steps_charged, "planned": plan.steps}
    statement = read_statement(run)
    if as_json:
        print_json(shown | {"privacy": json.loads(statement.to_json())})
        return
    stdout.print(f"{run}: {spec.name} over {shown['items']:,} items, finished", markup=False, soft_wrap=True)
    if "spent" in shown:
        spent, steps = shown["spent"], shown["steps"]
        stdout.print(
            f"charged: {steps['charged']} of {steps['planned']} steps, epsilon {spent['epsilon']:.3f} of {spent['of']:g} "
            f"at delta {spent['delta']:g}",
            soft_wrap=True,
        )
    stdout.print(statement.text(), markup=False, soft_wrap=True)


def _show_old(run: Path, config: dict[str, Any], as_json: bool) -> None:
    """A folder of format 1, which nothing else opens."""
    from dpformer.artifact.layout import OLD_FORMAT
    from dpformer.cli.output import print_json, stdout

    if as_json:
        print_json({"run": str(run), "version": 1, "insecure": OLD_FORMAT, "recipe": config.get("recipe")})
        return
    stdout.print(f"INSECURE: {run} {OLD_FORMAT}.", markup=False, soft_wrap=True)
    for name, value in (config.get("recipe") or {}).items():
        stdout.print(f"{name}: {value}", markup=False, soft_wrap=True)

"""`dpformer refit`: the next model, on a new log, as the last one was made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpformer.cli.recipe_options import AccountFolder, Epsilon, account_of

if TYPE_CHECKING:
    from dpformer.artifact import Artifact


def refit(
    run: Annotated[Path, typer.Argument(help="Folder of the last run.")],
    log: Annotated[Path, typer.Argument(help="The new log, or a folder made of it by `dpformer prepare`.")],
    new: Annotated[Path, typer.Option("--run", "-o", help="Folder of the new run.")],
    data: Annotated[Path | None, typer.Option(help="Folder for the prepared log; NEW-data by default.")] = None,
    epsilon: Epsilon = None,
    account: AccountFolder = None,
    prior: Annotated[
        bool,
        typer.Option("--prior/--no-prior", help="Combine the statistics with those of earlier runs of the account."),
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Fit the same recipe on a new log, read as the last one was, and charge it to the same account of people."""
    from dpformer.artifact import load as load_artifact
    from dpformer.artifact.layout import LOCAL
    from dpformer.cli.fit import train
    from dpformer.cli.output import stderr
    from dpformer.data import load, prepare, save
    from dpformer.data.store import MANIFEST
    from dpformer.files import read_json
    from dpformer.fit.folder import read_recipe, refuse_used
    from dpformer.fit.prior import prior_from
    from dpformer.fit.run import start
    from dpformer.privacy import read_ledger

    artifact, recipe = load_artifact(run), read_recipe(run)
    if epsilon is not None:
        recipe = recipe.changed({"epsilon": epsilon})
    local = read_json(run / LOCAL) if (run / LOCAL).exists() else {}
    people = account_of(account or (Path(local["account"]) if "account" in local else None))
    refuse_used(new)
    if not (log / MANIFEST).exists():
        prepared = data or new.with_name(f"{new.name}-data")
        save(prepare(str(log), **_reading(artifact, local)), prepared)
        log = prepared
    if people is None and not quiet:
        stderr.print(f"{run}: was charged to no account of people, and neither is this run (--account)", soft_wrap=True)
    earlier = None
    if prior and people is not None:
        # Only of runs of the same account: the statement's total has to include what the model is made of.
        receipt = read_ledger(run).receipt
        same = receipt is not None and receipt.account == people.read(receipt, str(run)).id
        earlier = prior_from(run, load(log)) if same else None
    train(start(new, log, recipe, account=people, prior=earlier), [], quiet, as_json)


def _reading(artifact: Artifact, local: dict[str, Any]) -> dict[str, Any]:
    """Options for `prepare`: the columns, the filters and the catalogue of the last run."""
    from dpformer.data.store import MANIFEST
    from dpformer.errors import DPFormerError
    from dpformer.files import read_json

    manifest = read_json(Path(local.get("data", "nowhere")) / MANIFEST)
    if "dataset" in manifest:
        raise DPFormerError(
            f"{manifest['dataset']['name']} has its own columns; prepare the new log first, then refit on its folder"
        )
    columns = {
        role.removesuffix("_id").replace("timestamp", "time"): name
        for role, name in manifest["input"]["columns"].items()
    }
    filters = {name: value for name, value in manifest["options"].items() if value}
    mode = manifest.get("catalogue", {}).get("mode", "log")
    # The items of the last model, in the same order: numbers stay the same, and further columns too.
    catalogue = artifact.catalogue.drop("item") if mode == "public" else mode
    if mode == "public":
        columns.pop("title", None)
    return columns | filters | {"catalogue": catalogue}

"""`dpformer refit`: the next model, on a new log, as the last one was made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dpformer.cli.fit import train
from dpformer.cli.options import AccountFolder, AsJson, Quiet, account_of, reads_log
from dpformer.cli.output import say
from dpformer.cli.prepare import print_summary
from dpformer.errors import DPFormerError

if TYPE_CHECKING:
    from dpformer.artifact import Artifact


@reads_log()
def refit(
    run: Annotated[Path, Argument(help="Folder of the last run.")],
    log: Annotated[Path, Argument(help="The new log, or a folder made of it by `dpformer prepare`.")],
    new: Annotated[Path, Option("--run", "-o", help="Folder of the new run.")],
    data: Annotated[Path | None, Option(help="Folder for the prepared log; NEW-data by default.")] = None,
    catalogue: Annotated[
        str | None, Option(help="A new FILE of public items; by default the items of the last run.")
    ] = None,
    date: Annotated[str | None, Option(help="Split the new log by time, at this date.")] = None,
    epsilon: Annotated[float | None, Option(help="The budget; inf trains without privacy.")] = None,
    account: AccountFolder = None,
    prior: Annotated[
        bool, Option("--prior/--no-prior", help="Combine the statistics with those of earlier runs of the account.")
    ] = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Fit the same recipe on a new log, read as the last one was, and charge it to the same account of people.

    The columns of the log, its filters, the catalogue and the account are those of the last run, unless an option says otherwise.
    """
    from dpformer.artifact import load as load_artifact
    from dpformer.artifact.layout import LOCAL
    from dpformer.data import load, prepare, save
    from dpformer.data.store import MANIFEST
    from dpformer.files import read_json, write_json
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
    if (log / MANIFEST).exists():
        if reading or catalogue or date:
            raise DPFormerError(f"{log}: is prepared already; leave out the options that say how a log is read")
    else:
        dataset = prepare(str(log), **_options(artifact, catalogue, date, reading))
        log = data or new.with_name(f"{new.name}-data")
        # A folder of that name is left of a refit that was refused.
        save(dataset, log, force=data is None)
        if not quiet:
            print_summary(dataset.manifest)
    if people is None and not quiet:
        say(f"{run}: was charged to no account of people, and neither is this run (--account)")
    earlier = None
    if prior and people is not None:
        # Only of runs of the same account: the statement's total has to include what the model is made of.
        receipt = read_ledger(run).receipt
        same = receipt is not None and receipt.account == people.read(receipt, str(run)).id
        earlier = prior_from(run, load(log)) if same else None
    started = start(new, log, recipe, account=people, prior=earlier)
    if earlier is not None:  # for `verify`, which makes the prior again
        write_json(new / LOCAL, {**read_json(new / LOCAL), "earlier": str(run.resolve())}, mode=0o600)
    train(started, [], quiet, as_json)


def _options(artifact: Artifact, catalogue: str | None, date: str | None, reading: dict[str, Any]) -> dict[str, Any]:
    """Options for `prepare`: the columns, the filters and the catalogue of the last run, but for those that are given."""
    from dpformer.data import like

    if date is None and "date" in artifact.log:
        last = f"the last log was split at {artifact.log['date']}"
        raise DPFormerError(f"{last}; give the date of the new one with --date, or prepare it first")
    split = {} if date is None else {"split": "time", "date": date}
    mode: Any = artifact.statement.data.catalogue
    # The items of the last model, in the same order: numbers stay the same, and further columns too.
    items = artifact.catalogue.drop("item") if mode == "public" else mode
    return like(artifact.log, whole=True, **reading, **split, catalogue=items if catalogue is None else catalogue)

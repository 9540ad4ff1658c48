"""`dpformer privacy`: the privacy statement of a run, or its entry for a public registry."""

from pathlib import Path
from typing import Annotated

import typer


def privacy(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    registry: Annotated[
        bool, typer.Option("--registry", help="As an entry of a registry of deployments (JSON).")
    ] = False,
    organisation: Annotated[str | None, typer.Option(help="For the registry: who releases the model.")] = None,
    intended_use: Annotated[str | None, typer.Option(help="For the registry: what it is released for.")] = None,
    justification: Annotated[str | None, typer.Option(help="For the registry: why this epsilon and delta.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """Print the privacy statement of a run, in words, as JSON, or as an entry of a public registry."""
    from dpformer.artifact import check_files, check_version, read_config, read_statement, refuse_unfinished
    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.privacy.registry import registry_entry

    check_version(run, read_config(run))
    refuse_unfinished(run)
    check_files(run)
    statement = read_statement(run)
    if registry:
        entry = registry_entry(
            statement,
            run.resolve().name,
            organisation=organisation,
            intended_use=intended_use,
            justification=justification,
        )
        print_json(entry.model_dump(mode="json"))
        for name in entry.to_fill_in:
            stderr.print(f"to fill in: --{name.replace('_', '-')}", markup=False)
    elif as_json:
        print_json(statement.model_dump(mode="json"))
    else:
        stdout.print(statement.text(), markup=False, soft_wrap=True)

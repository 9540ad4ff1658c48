"""`dpformer audit`: attack the guarantee, and show that the attack would have noticed."""

from pathlib import Path
from typing import Annotated

import typer


def audit(
    run: Annotated[
        Path | None, typer.Argument(help="A run whose recipe and data are audited; embedded data by default.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The run's prepared data, if it was moved.")] = None,
    canaries: Annotated[int, typer.Option(min=20, help="Invented users of the one-run audit.")] = 400,
    users: Annotated[int, typer.Option(min=20, help="Members, and as many outsiders, of the membership attack.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Of canaries, coins and noise: the same figures every time.")] = 1,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for audit.md, audit.json and audit.svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Empirical lower bounds beside the claimed epsilon, with controls. Exit code 1: claim refuted, or a control missed."""
    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.trust.audit import audit as attack
    from dpformer.trust.audit import embedded, of_run
    from dpformer.trust.audit.report import tables, write_report

    setting = embedded(seed) if run is None else of_run(run, data, seed)
    stderr.print(f"auditing {setting.name}", soft_wrap=True, markup=False)
    result = attack(setting, canaries, users, on_part=lambda name: stderr.print(f"{name} ...", markup=False))
    if output is not None:
        write_report(result, output)
        stderr.print(f"written to {output}; computed on people's data without noise: not private", soft_wrap=True)
    if as_json:
        print_json(result.to_json())
    else:
        for table in tables(result):
            stdout.print(table)
    for problem in result.problems:
        stderr.print(f"[bold red]failed:[/] {problem}", soft_wrap=True)
    if result.problems:
        raise typer.Exit(1)

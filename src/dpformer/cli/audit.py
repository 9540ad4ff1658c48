"""`dpformer audit`: attack the guarantee, and show that the attack would have noticed."""

from pathlib import Path
from typing import Annotated

import typer


def audit(
    run: Annotated[Path | None, typer.Argument(help="A run whose recipe is audited; a preset by default.")] = None,
    preset: Annotated[str, typer.Option(help="Audit this preset.")] = "default",
    epsilon: Annotated[float, typer.Option(help="The claim, with a preset.")] = 4.0,
    fits: Annotated[int | None, typer.Option(min=2, help="How many fits are attacked; more show more.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of canaries, coins and noise: the same figures every time.")] = 1,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a report: a file.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Empirical lower bounds beside the claimed epsilon, each with a planted defect. Exit code 1: refuted, or no verdict."""
    from rich.table import Table

    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.files import write_file
    from dpformer.trust.audit import audit as attack
    from dpformer.trust.audit import of_preset, of_run
    from dpformer.trust.audit.page import COLUMNS, html, rows

    setting = of_preset(preset, epsilon, seed, fits) if run is None else of_run(run, seed, fits)
    stderr.print(f"auditing {setting.name} on an invented log", soft_wrap=True, markup=False)
    result = attack(setting, on_part=lambda name: stderr.print(f"{name} ...", markup=False))
    if output is not None:
        write_file(output, html([result]).encode())
        stderr.print(f"written to {output}", soft_wrap=True)
    if as_json:
        print_json(result.to_json())
    else:
        table = Table(*COLUMNS[2:], title=f"{setting.name}, epsilon {result.epsilon:.2f} at delta {result.delta:g}")
        for row in rows([result]):
            table.add_row(*row[2:])
        stdout.print(table)
    for problem in result.problems:
        stderr.print(f"[bold red]failed:[/] {problem}", soft_wrap=True)
    if not result.passed:
        raise typer.Exit(1)

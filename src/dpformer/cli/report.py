"""`dpformer report`: runs as one page that people look at."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs; several are compared.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("report.html"),
    history: Annotated[
        list[str] | None,
        typer.Option(help="Ids or titles separated by commas: a history to show recommendations for; repeat for more."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The headline figures as JSON on stdout.")] = False,
) -> None:
    """Write one HTML page about runs: accuracy with its protocol, privacy in plain words, plots. It needs no network."""
    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.files import write_file
    from dpformer.report import make_report

    with stderr.status("drawing ..."):
        made = make_report(runs, history or [])
    write_file(output, made.html.encode(), 0o600)
    if as_json:
        print_json({"report": str(output), "runs": made.figures()})
        return
    stdout.print(f"written to {output}", markup=False, soft_wrap=True)
    for run in made.runs:
        if run.metrics is None and run.evaluated:
            stderr.print(
                f"{run.folder}: not evaluated; try: dpformer evaluate {run.folder}", markup=False, soft_wrap=True
            )
    stderr.print("it shows losses and metrics, which are not private: they are marked so", soft_wrap=True)

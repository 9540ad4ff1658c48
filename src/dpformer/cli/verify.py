"""`dpformer verify`: check a run, a module of your own, or every built-in model, against independent arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from dpformer.trust.verify import Verification


def verify(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a finished run; every built-in model by default.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(help="Your own model: package.module:factory, which returns (module, compute_losses, samples)."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The run's prepared data, if it was moved.")] = None,
    max_norm: Annotated[float, typer.Option(help="With --module: the clipping norm C.")] = 1.0,
    rule: Annotated[str, typer.Option(help="With --module: automatic or flat.")] = "automatic",
    as_json: Annotated[bool, typer.Option("--json", help="Checks and figures as JSON on stdout.")] = False,
) -> None:
    """Check clipping, noise, steps, resuming, ledger and statement. Exit code 1 if a check fails."""
    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.errors import DPFormerError
    from dpformer.trust.verify import verify_built_in, verify_module, verify_run

    if run is not None and module is not None:
        raise DPFormerError("give a run or --module, not both")
    if rule != "automatic" and rule != "flat":
        raise DPFormerError(f"--rule {rule!r} is not automatic or flat")
    verifications: list[Any] = []

    def add(one: "Verification") -> None:
        verifications.append(one)
        if not as_json:
            stdout.print(table(one))

    if module is not None:
        add(verify_module(module, max_norm, "flat" if rule == "flat" else "automatic"))
    elif run is not None:
        with stderr.status(f"verifying {run} ..."):
            add(verify_run(run, data))
    else:
        for one in verify_built_in(on_model=lambda name: stderr.print(f"verifying {name} ...")):
            add(one)
    if as_json:
        print_json(
            {"passed": all(one.passed for one in verifications), "subjects": [one.to_json() for one in verifications]}
        )
    bad = [f"{one.subject}: {name}" for one in verifications for name in one.failed]
    for line in bad:
        stderr.print(f"[bold red]failed:[/] {line}", soft_wrap=True)
    if bad:
        raise typer.Exit(1)


def table(one: "Verification") -> "Table":
    """One line a check."""
    from rich.markup import escape
    from rich.table import Table

    colours = {"pass": "green", "fail": "bold red", "not checked": "yellow"}
    result = Table("check", "", "found", title=escape(one.subject), title_justify="left")
    for check in one.checks:
        result.add_row(check.name, f"[{colours[check.status]}]{check.status}[/]", escape(check.detail))
    return result

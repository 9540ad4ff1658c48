"""`dpformer verify` and `dpformer audit`: recompute what a run promises, and attack its recipe. Exit code 1 if a check fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from dpformer.cli.options import AsJson
from dpformer.cli.output import print_json, say, stderr, stdout
from dpformer.errors import DPFormerError

if TYPE_CHECKING:
    from dpformer.trust.verify import Verification


def verify(
    run: Annotated[Path | None, Argument(help="Folder of a finished run; every built-in model by default.")] = None,
    module: Annotated[
        str | None,
        Option(help="Your own model: package.module:factory, which returns (module, compute_losses, samples)."),
    ] = None,
    data: Annotated[Path | None, Option(help="The run's prepared data, if it was moved.")] = None,
    max_norm: Annotated[float, Option(help="With --module: the clipping norm C.")] = 1.0,
    rule: Annotated[str, Option(help="With --module: automatic or flat.")] = "automatic",
    as_json: AsJson = False,
) -> None:
    """Check clipping, noise, steps, resuming, ledger and statement. Exit code 1 if a check fails."""
    from dpformer.trust.verify import verify_built_in, verify_module, verify_run

    if run is not None and module is not None:
        raise DPFormerError("give a run or --module, not both")
    if rule != "automatic" and rule != "flat":
        raise DPFormerError(f"--rule {rule!r} is not automatic or flat")
    made: list[Verification] = []

    def add(one: Verification) -> None:
        made.append(one)
        if not as_json:
            stdout.print(_checks(one))

    if module is not None:
        add(verify_module(module, max_norm, "flat" if rule == "flat" else "automatic"))
    elif run is not None:
        with stderr.status(f"verifying {run} ..."):
            add(verify_run(run, data))
    else:
        for one in verify_built_in(on_model=lambda name: say(f"verifying {name} ...")):
            add(one)
    if as_json:
        print_json({"passed": all(one.passed for one in made), "subjects": [one.to_json() for one in made]})
    failed = [f"{one.subject}: {name}" for one in made for name in one.failed]
    _end(failed, not failed)


def audit(
    run: Annotated[Path | None, Argument(help="A run whose recipe is audited; a preset by default.")] = None,
    preset: Annotated[str, Option(help="Audit this preset.")] = "default",
    epsilon: Annotated[float, Option(help="The claim, with a preset.")] = 4.0,
    fits: Annotated[int | None, Option(min=2, help="How many fits are attacked; more show more.")] = None,
    seed: Annotated[int, Option(min=0, help="Of canaries, coins and noise: the same figures every time.")] = 1,
    output: Annotated[Path | None, Option("-o", "--output", help="Write a report: a file.html.")] = None,
    as_json: AsJson = False,
) -> None:
    """Empirical lower bounds beside the claimed epsilon, each with a planted defect. Exit code 1: refuted, or no verdict."""
    from dpformer.files import write_file
    from dpformer.trust.audit import audit as attack
    from dpformer.trust.audit import of_preset, of_run
    from dpformer.trust.audit.page import COLUMNS, html, rows

    setting = of_preset(preset, epsilon, seed, fits) if run is None else of_run(run, seed, fits)
    say(f"auditing {setting.name} on an invented log")
    result = attack(setting, on_part=lambda name: say(f"{name} ..."))
    if output is not None:
        write_file(output, html([result]).encode())
        say(f"written to {output}")
    if as_json:
        print_json(result.to_json())
    else:
        table = Table(*COLUMNS[2:], title=f"{setting.name}, epsilon {result.epsilon:.2f} at delta {result.delta:g}")
        for row in rows([result]):
            table.add_row(*row[2:])
        stdout.print(table)
    _end(result.problems, result.passed)


def _checks(one: Verification) -> Table:
    colours = {"pass": "green", "fail": "bold red", "not checked": "yellow"}
    table = Table("check", "", "found", title=escape(one.subject), title_justify="left")
    for check in one.checks:
        table.add_row(check.name, f"[{colours[check.status]}]{check.status}[/]", escape(check.detail))
    return table


def _end(problems: list[str], passed: bool) -> None:
    for problem in problems:
        stderr.print(f"[bold red]failed:[/] {escape(problem)}", soft_wrap=True)
    if not passed:
        raise typer.Exit(1)

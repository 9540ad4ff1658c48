"""`dpformer account`: what several runs on the same people spend together, under a cap."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from dpformer.cli import output as screen
from dpformer.cli.options import AsJson
from dpformer.cli.output import print_json, say, stdout
from dpformer.errors import PrivacyError

if TYPE_CHECKING:
    from dpformer.privacy.account import Spending

account = typer.Typer(
    no_args_is_help=True,
    help="The account of people: what several runs on the same people spend together, under a cap.",
)
Folder = Annotated[Path, Argument(help="Folder of the account, such as people.account.")]
BAR = 20


@account.command()
def new(
    folder: Folder,
    epsilon: Annotated[float, Option(help="The cap: what all runs together may spend.")],
    delta: Annotated[float, Option(help="Of all runs together; below 1 / people.")] = 1e-5,
    per: Annotated[str, Option(help="`year`: the cap is for each calendar year; for life the years add up.")] = "",
    as_json: AsJson = False,
) -> None:
    """Open an account for a population. Every `fit --account` is charged to it before it asks anything."""
    from dpformer.privacy.account import Cap, PeopleAccount

    opened = PeopleAccount.create(folder, Cap(epsilon, delta, per))
    if as_json:
        print_json(_figures(opened.read()))
    else:
        say(f"opened {folder}: give it to every run on these people: dpformer fit ... --account {folder}")


@account.command()
def add(folder: Folder, run: Annotated[Path, Argument(help="A run that was charged to no account.")]) -> None:
    """Charge a run that was made without the account, by its ledger. A run is charged once, however often it is added."""
    from dpformer.privacy import read_ledger
    from dpformer.privacy.account import PeopleAccount, RunCharge, receipts_beside

    ledger = read_ledger(run)
    charge = RunCharge.of(ledger.run_id, run.resolve().name, ledger.plan)
    receipt = PeopleAccount(folder).charge(charge, receipts_beside(run), over=True)
    say(f"{run} is charge {receipt.entries} of {folder}")


@account.command()
def show(
    folder: Folder,
    plot: Annotated[
        Path | None, Option(help="Draw what was spent over time into this SVG file.", metavar="FILE.svg")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each run was charged, what all of them spend together over time, and what is left."""
    from dpformer.files import write_file
    from dpformer.privacy.account import PeopleAccount

    figures = _figures(PeopleAccount(folder).read())
    if plot is not None:
        if not figures["runs"]:
            raise PrivacyError(f"{folder}: has no charges yet, so there is nothing to draw; leave out --plot")
        write_file(plot, _plot(figures).encode())
        say(f"drawn in {plot}")
    if as_json:
        print_json(figures)
    else:
        _print(figures)


def _print(figures: dict[str, Any]) -> None:
    from dpformer.privacy.wording import round_up

    cap = figures["cap"]
    limit, delta, per = cap["epsilon"], cap["delta"], " per calendar year" if cap["per"] else ""
    table = Table(title=f"account {figures['id'][:8]}: cap epsilon {limit:g} at delta {delta:g}{per}")
    for name in ("charged", "run", "users", "alone", "together", f"0 to {limit:g}"):
        right = name in ("users", "alone", "together")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "run")
    for run in figures["runs"]:
        bar = "█" * round(BAR * min(run["counted"] / limit, 1))
        alone = f"{run['epsilon']:g}" + ("" if run["delta"] == delta else f" at {run['delta']:g}")
        counted = f"{round_up(run['counted'], 4):.4g}"
        table.add_row(run["time"][:16], run["name"], f"{run['users']:,}", alone, counted, f"{bar:·<{BAR}}")
    stdout.print(table)
    screen.show(
        f"spent {round_up(figures['spent'], 4):.4g}{' this year' if per else ''}; left: one more run of epsilon "
        f"{figures['left']:g} at delta {delta:g} (without steps). A run is charged its whole plan, whether or not it ends"
    )
    if per:
        screen.show(f"for life the years add up: {round_up(figures['for_life'], 4):.4g} so far")


def _plot(figures: dict[str, Any]) -> str:
    """What counts against the cap after each charge, as a line of steps, and the cap; SVG."""
    from dpformer.svg import Axis, Series, alone, lines

    cap, runs = figures["cap"]["epsilon"], figures["runs"]
    times = [datetime.fromisoformat(run["time"]).timestamp() for run in runs]
    end = times[-1] + max(0.05 * (times[-1] - times[0]), 3600)
    # From 0 at the first charge, level until the next one.
    corners = [(times[0], 0.0)]
    for run, time, until in zip(runs, times, [*times[1:], end], strict=True):
        corners += [(time, run["counted"]), (until, run["counted"])]
    form = "%Y-%m-%d" if end - times[0] > 7 * 86_400 else "%d %H:%M"
    axis = Axis("time (UTC)", tick=lambda value: datetime.fromtimestamp(value, UTC).strftime(form))
    limit = Series(f"cap {cap:g}", [(times[0], cap), (end, cap)], dashed=True)
    label = f"epsilon of all runs together at delta {figures['cap']['delta']:g}"
    return alone(lines(label, [Series("spent", corners), limit], axis, Axis("epsilon", low=0.0)))


def _figures(spending: Spending) -> dict[str, Any]:
    from dpformer.cli.plan import one_gaussian
    from dpformer.privacy.account import largest_epsilon, now, together

    cap, runs = spending.cap, []
    for number, run in enumerate(spending.runs, 1):
        until = replace(spending, runs=spending.runs[:number])
        counted = together(until.counted(run.time), cap.delta)
        runs.append({**asdict(run), "counted": counted, "together": together(until.runs, cap.delta)})
    now_counted = spending.counted(now())
    return {
        "id": spending.id,
        "cap": asdict(cap),
        "runs": runs,
        "spent": together(now_counted, cap.delta),
        "left": largest_epsilon(now_counted, cap, one_gaussian(cap)),
        "for_life": together(spending.runs, cap.delta),
    }

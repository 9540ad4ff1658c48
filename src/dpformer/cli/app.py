"""The list of commands. Other packages add theirs by `plugins`."""

from typing import Annotated

import typer
from typer import Option

from dpformer import __version__
from dpformer.cli.account import account
from dpformer.cli.check import audit, verify
from dpformer.cli.demo import demo
from dpformer.cli.evaluate import evaluate
from dpformer.cli.fit import fit, resume
from dpformer.cli.plan import plan
from dpformer.cli.plugins import Commands
from dpformer.cli.prepare import prepare
from dpformer.cli.recommend import recommend, similar
from dpformer.cli.refit import refit
from dpformer.cli.released import export, privacy, report, serve, show

ABOUT = "Private recommendations from people's sequences, with user-level differential privacy."
app = typer.Typer(name="dpformer", cls=Commands, help=ABOUT, no_args_is_help=True, pretty_exceptions_enable=False)
MAKE = (demo, prepare, plan, fit, resume, refit)
USE = (evaluate, report, recommend, similar, serve, export, show, privacy, verify, audit)
for command in MAKE + USE:
    app.command()(command)
app.add_typer(account, name="account")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dpformer {__version__}")
        raise typer.Exit


@app.callback(help=ABOUT)
def options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""

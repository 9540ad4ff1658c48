"""The list of commands. Each lives in a module of its own, named after it; other packages add theirs by `plugins`."""

from typing import Annotated

import typer

from dpformer import __version__
from dpformer.cli.account import account
from dpformer.cli.audit import audit
from dpformer.cli.demo import demo
from dpformer.cli.evaluate import evaluate
from dpformer.cli.export import export
from dpformer.cli.fit import fit, resume
from dpformer.cli.plan import plan
from dpformer.cli.plugins import Commands
from dpformer.cli.prepare import prepare
from dpformer.cli.privacy import privacy
from dpformer.cli.recommend import recommend, similar
from dpformer.cli.refit import refit
from dpformer.cli.report import report
from dpformer.cli.serve import serve
from dpformer.cli.show import show
from dpformer.cli.verify import verify

app = typer.Typer(
    name="dpformer",
    cls=Commands,
    help="Private recommendations from people's sequences, with user-level differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    demo,
    prepare,
    plan,
    fit,
    resume,
    refit,
    evaluate,
    report,
    recommend,
    similar,
    serve,
    export,
    show,
    privacy,
    verify,
    audit,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(account, name="account")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dpformer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Private recommendations from people's sequences, with user-level differential privacy."""

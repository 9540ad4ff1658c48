"""The command line: what people type. Commands import what they need when they run, so `--help` is quick."""

import sys

from dpformer.errors import DPFormerError


def main() -> None:
    """Run the command line; a `DPFormerError` becomes one line on stderr and exit code 2."""
    from dpformer.cli.app import app

    try:
        app()
    except DPFormerError as error:
        from dpformer.cli.output import stderr

        stderr.print(f"[bold red]error:[/] {_plain(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _plain(message: str) -> str:
    """One line, with nothing in it read as markup."""
    from rich.markup import escape

    return escape(" ".join(message.split()))

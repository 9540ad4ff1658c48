"""The command line: what people type. Commands import what they need when they run, so `--help` is quick."""

import os
import sys

from dpformer.errors import DPFormerError


def main() -> None:
    """Run the command line; a `DPFormerError` becomes one line on stderr and exit code 2."""
    from dpformer.cli.app import app

    try:
        app()
    except DPFormerError as error:
        _print_error(error.typed)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `dpformer ... | head`: the reader of the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (MemoryError, OSError) as error:
        reason = "out of memory; close other programs, or use a machine with more"
        if isinstance(error, OSError):
            what = f"{error.filename or 'a file'}: {error.strerror or error}"
            reason = f"{what}; check the path, its permissions and the space left"
        _print_error(reason)
        sys.exit(1)


def _print_error(message: str) -> None:
    """One line on stderr, with nothing in it read as markup."""
    from rich.markup import escape

    from dpformer.cli.output import stderr

    stderr.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", soft_wrap=True, highlight=False)

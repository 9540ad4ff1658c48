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
        from dpformer.cli.output import stderr

        stderr.print(f"[bold red]error:[/] {_plain(error.typed)}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `dpformer ... | head`: the reader of the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (MemoryError, OSError) as error:
        from dpformer.cli.output import stderr

        reason = "out of memory; close other programs, or use a machine with more"
        if isinstance(error, OSError):
            what = f"{error.filename or 'a file'}: {error.strerror or error}"
            reason = f"{what}; check the path, its permissions and the space left"
        stderr.print(f"[bold red]error:[/] {_plain(reason)}", soft_wrap=True, highlight=False)
        sys.exit(1)


def _plain(message: str) -> str:
    """One line, with nothing in it read as markup."""
    from rich.markup import escape

    return escape(" ".join(message.split()))

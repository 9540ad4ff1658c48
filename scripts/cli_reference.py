"""The reference of the command line, from the commands: `python scripts/cli_reference.py docs/cli.md`."""

import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from dpformer.cli.app import app
from dpformer.cli.plugins import plugins

HEAD = """# The command line

<!-- made by `python scripts/cli_reference.py docs/cli.md`; edit the commands -->

`dpformer COMMAND --help` prints the same. `dpformer --install-completion` sets up completion for your shell.
Exit codes: 0 done, 1 a check failed or the system did, 2 an error in what was asked, 130 stopped by Ctrl-C.
"""


def reference() -> str:
    """The page: each of our commands with its arguments and options, in the order of `dpformer --help`."""
    group: Any = get_command(app)
    context = group.make_context("dpformer", ["--help"], resilient_parsing=True)
    names = [name for name in group.list_commands(context) if name not in plugins()]
    parts = [HEAD]
    for name in names:
        parts += _command(f"dpformer {name}", group.get_command(context, name))
    return "\n".join(parts)


def _command(name: str, command: Any) -> list[str]:
    inner = getattr(command, "commands", {})
    parts = [
        f"## `{name}`" if name.count(" ") == 1 else f"### `{name}`",
        "",
        " ".join((command.help or "").split()),
        "",
    ]
    rows = [row for parameter in command.params for row in _row(parameter)] if not inner else []
    if rows:
        parts += ["| | default | |", "|---|---|---|", *rows, ""]
    for each, one in inner.items():
        parts += _command(f"{name} {each}", one)
    return parts


def _row(parameter: Any) -> list[str]:
    if parameter.name == "help" or getattr(parameter, "hidden", False):
        return []
    flags = [parameter.name.upper()] if parameter.param_type_name == "argument" else parameter.opts
    shown = ", ".join(f"`{flag}`" for flag in (*flags, *parameter.secondary_opts))
    default = "required" if parameter.required else _default(parameter)
    return [f"| {shown} | {default} | {_escaped(' '.join((parameter.help or '').split()))} |"]


def _default(parameter: Any) -> str:
    value = parameter.default
    if value in (None, False, (), []) or callable(value) or getattr(parameter, "is_flag", False):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")

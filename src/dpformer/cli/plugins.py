"""Commands of other packages: each is an entry point of the group `dpformer.commands` that names a function for typer.

Packages are searched only for a name that is not one of our commands, and for `dpformer --help`. A plugin that cannot be loaded
is listed with the others; calling it says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from dpformer.errors import DPFormerError

GROUP = "dpformer.commands"
# Commands of the package in the folder `experiments` of this repository.
EXPERIMENTS = ("reproduce", "bench")


class Commands(TyperGroup):
    """Our own commands, then those of plugins; a plugin cannot take the name of one of ours."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, ours first."""
        ours = super().list_commands(ctx)
        return [*ours, *(name for name in plugins() if name not in ours)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of ours, or a plugin, loaded now."""
        ours = super().get_command(ctx, cmd_name)
        if ours is not None or cmd_name not in (*plugins(), *EXPERIMENTS):
            return ours
        if cmd_name in plugins():
            return load(plugins()[cmd_name])
        about = "comes with the experiments package"
        cure = "which is not installed; in a clone of the repository: pip install ./experiments"
        return _failing(cmd_name, about, f"{cmd_name} {about}, {cure}")


@cache
def plugins() -> dict[str, EntryPoint]:
    """The entry points by name. Nothing is imported yet."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def load(point: EntryPoint) -> Any:
    """The command of a plugin; one that only says what is wrong if the plugin is broken, whatever it raises."""
    try:
        return _command(point.name, point.load())
    except (Exception, SystemExit) as error:  # noqa: BLE001  - `dpformer --help` must work whatever else is installed
        package = point.dist.name if point.dist is not None else point.value
        about, cause = f"{package} cannot be loaded", f"{type(error).__name__}: {error}"
        cure = f"install it again, or uninstall it: pip uninstall {package}"
        return _failing(point.name, about, f"{point.name}: {about} ({cause}); {cure}")


def _failing(name: str, about: str, message: str) -> Any:
    """A command that takes any arguments and raises."""

    def fail(ctx: typer.Context) -> None:
        raise DPFormerError(message)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return _command(name, fail, help=f"Not available: {about}.", context_settings=settings)


def _command(name: str, function: Callable[..., Any], **settings: Any) -> Any:
    one = typer.Typer(add_completion=False)
    one.command(name, **settings)(function)
    return get_command(one)

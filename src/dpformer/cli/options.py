"""Groups of options that several commands have: how a log is read; the recipe and its budget. Each is defined once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from dpformer.fit.recipe import Recipe
    from dpformer.privacy.account import PeopleAccount

Epsilon = Annotated[float | None, typer.Option(help="The budget; inf trains without privacy.")]
AccountFolder = Annotated[
    Path | None,
    typer.Option("--account", help="The account of these people (`dpformer account new`), charged before the start."),
]
Command = Callable[..., None]
_READING: dict[str, tuple[type, str]] = {
    "user": (str, "Column of the user."),
    "item": (str, "Column of the item."),
    "time": (str, "Column of the time."),
    "no_time": (bool, "No times: the order of the file is the order of time."),
    "time_format": (str, "How times are written, such as '%d/%m/%Y %H:%M'."),
    "null_values": (str, "What means missing, separated by commas, instead of NULL,nan,None,N/A,NA,nil,undefined."),
    "drop_missing": (bool, "Drop events without user, item or time; else they are an error."),
    "fold_users": (bool, "Ignore letter case and surrounding blanks of user ids."),
    "where": (str, "Keep the events that meet this SQL condition, such as \"qty > 0 and shop = 'north'\"."),
    "dedupe": (bool, "Keep one of several events equal in user, item and time."),
}
_RECIPE: dict[str, tuple[Any, str]] = {
    "epsilon": (float, "The budget; inf trains without privacy."),
    "delta": (float, "Must be below 1 / users."),
    "model": (str, "The network: transformer, gru or lstm."),
    "preset": (
        str,
        "default, pure (DP-SGD alone), whole (with statistics), paper; transitions, popularity (no network).",
    ),
    "config": (Path, "A TOML file of settings."),
    "set": (list[str], "Any setting, as name=value; repeat for more. See docs/training.md."),
    "population": (
        int,
        "A public number of users for rate and delta, at least the number in the data (the default).",
    ),
    "seed": (int, "Noise from a given seed, which anyone can subtract: research only, marked insecure."),
}


def reads_log(where: str = "--where") -> Callable[[Command], Command]:
    """Give a command the options that say how a log is read; those typed come as a dictionary, `reading`, for `data.Options`.

    where: the flag of the condition on events, for a command that has another `--where`.
    """

    def typed(given: dict[str, Any]) -> dict[str, Any]:
        if "null_values" in given:
            given["null_values"] = tuple(text.strip() for text in given["null_values"].split(","))
        return given

    return functools.partial(_with_options, _READING, "reading", typed, {"where": where})


def chooses_recipe(command: Command) -> Command:
    """Give a command the options of a recipe. It gets `recipe`, a function that makes it; keywords change options."""
    return _with_options(_RECIPE, "recipe", lambda given: functools.partial(_recipe, **given), {}, command)


def _with_options(
    options: dict[str, tuple[Any, str]], group: str, made: Callable[[Any], Any], flags: dict[str, str], command: Command
) -> Command:
    """The command with further options, which it gets as one argument, `group`: what `made` makes of those that are typed."""

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        typed = {name: value for name in options if (value := given.pop(f"{group}_{name}")) is not None}
        command(**given, **{group: made(typed)})

    hints, keyword = get_type_hints(command, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    parameters = [
        one.replace(kind=keyword, annotation=hints[one.name])
        for one in inspect.signature(command).parameters.values()
        if one.name != group
    ]
    # The options of a recipe stand before that of its account; others at the end.
    place = next(
        (n for n, one in enumerate(parameters) if options is _RECIPE and one.name == "account"), len(parameters)
    )
    for name, (kind, text) in reversed(options.items()):
        flag = flags.get(name, f"--{name.replace('_', '-')}")
        hint = Annotated[kind | None, typer.Option(flag, help=text)]  # type: ignore[valid-type]
        parameters.insert(place, inspect.Parameter(f"{group}_{name}", keyword, default=None, annotation=hint))
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


def _recipe(**given: Any) -> Recipe:
    from dpformer.fit.presets import make_recipe

    settings = parse_settings(given.pop("set", ()))
    return make_recipe(given.pop("preset", "default"), given.pop("config", None), **given, **settings)


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Settings as `--set` has them: name=value, a value as JSON or as text."""
    import json

    from dpformer.errors import DPFormerError

    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise DPFormerError(f"--set {pair!r} is not name=value")
        try:
            settings[key.strip().replace("-", "_")] = json.loads(text)
        except ValueError:
            settings[key.strip().replace("-", "_")] = text
    return settings


def account_of(folder: Path | None) -> PeopleAccount | None:
    """The account, which must exist."""
    from dpformer.privacy.account import PeopleAccount

    if folder is None:
        return None
    account = PeopleAccount(folder)
    account.read()
    return account

"""Options that several commands have, each defined once; among them how a log is read, and the recipe with its budget."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Argument, Option

from dpformer.errors import DPFormerError

if TYPE_CHECKING:
    from dpformer.fit.recipe import Recipe
    from dpformer.privacy.account import PeopleAccount

RunFolder = Annotated[Path, Argument(help="Folder of a finished run.")]
AsJson = Annotated[bool, Option("--json", help="The result as JSON on stdout.")]
Quiet = Annotated[bool, Option("--quiet", help="No progress.")]
AccountFolder = Annotated[
    Path | None,
    Option("--account", help="The account of these people (`dpformer account new`), charged before the start."),
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
_PREPARING: dict[str, tuple[type, str]] = {
    "catalogue": (
        str,
        "Which items there are: a FILE of public items, one per row, with titles; `private`: fit selects items by noisy counts; "
        "`log` (default): all items of the log, assumed public.",
    ),
    "title": (
        str,
        "Column of item titles, which are published with a model. Titles of a log are outside of the guarantee.",
    ),
    "features": (
        str,
        "Columns of a catalogue FILE by which rare and new items are scored, as category,price:10 (numbers in 10 bins).",
    ),
    "min_events": (int, "Smallest number of events per user and item. Outside the guarantee."),
    "filter": (str, "Count once (single-pass, default) or repeatedly (iterative)."),
    "min_user_events": (int, "Smallest number of events per user; other users stay, without events."),
    "split": (str, "Hold out each user's last items (leave-one-out, default), or events from --date on (time)."),
    "date": (str, "For --split time, such as 2025-02-01 (UTC)."),
}
_PRESETS = (
    "default, dpformer (DP-SGD alone), distilled (no steps on people), paper; transitions, popularity (no network); "
    "ceiling (epsilon inf)."
)
_RECIPE: dict[str, tuple[Any, str]] = {
    "epsilon": (float, "The budget; inf trains without privacy."),
    "delta": (float, "Must be below 1 / users."),
    "model": (str, "The network: transformer, gru or lstm."),
    "preset": (str, _PRESETS),
    "config": (Path, "A TOML file of settings."),
    "set": (list[str], "Any setting, as name=value; repeat for more. See docs/training.md."),
    "population": (int, "A public number of users for rate and delta, at least the number in the data (the default)."),
    "seed": (int, "Noise from a given seed, which anyone can subtract: research only, marked insecure."),
}


def reads_log(where: str = "--where", prepares: bool = False) -> Callable[[Command], Command]:
    """Give a command the options that say how a log is read; those typed come as a dictionary, `reading`, for `data.Options`.

    where: the flag of the condition on events, for a command that has another `--where`. prepares: with all other options too.
    """

    def typed(given: dict[str, Any]) -> dict[str, Any]:
        if "null_values" in given:
            given["null_values"] = tuple(text.strip() for text in given["null_values"].split(","))
        return given

    return functools.partial(
        _with_options, _PREPARING | _READING if prepares else _READING, "reading", typed, {"where": where}
    )


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
    own = [one for one in inspect.signature(command).parameters.values() if one.name != group]
    parameters = [one.replace(kind=keyword, annotation=hints[one.name]) for one in own]
    further = []
    for name, (kind, text) in options.items():
        flag = flags.get(name, f"--{name.replace('_', '-')}")
        hint = Annotated[kind | None, Option(flag, help=text)]  # type: ignore[valid-type]
        further.append(inspect.Parameter(f"{group}_{name}", keyword, default=None, annotation=hint))
    # The options of a recipe stand before that of its account; others at the end.
    names = [one.name for one in own]
    place = names.index("account") if options is _RECIPE else len(names)
    parameters[place:place] = further
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


def _recipe(**given: Any) -> Recipe:
    from dpformer.fit.presets import make_recipe

    settings = parse_settings(given.pop("set", ()))
    return make_recipe(given.pop("preset", "default"), given.pop("config", None), **given, **settings)


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Settings as `--set` has them: name=value, a value as JSON or as text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise DPFormerError(f"--set {pair!r} is not name=value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        settings[key.strip().replace("-", "_")] = value
    return settings


def account_of(folder: Path | None) -> PeopleAccount | None:
    """The account, which must exist."""
    from dpformer.privacy.account import PeopleAccount

    if folder is None:
        return None
    account = PeopleAccount(folder)
    account.read()
    return account

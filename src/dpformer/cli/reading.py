"""The options that say how a log is read: one definition for every command that reads one."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

_OPTIONS: dict[str, tuple[type, str]] = {
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


def reads_log(where: str = "--where") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options. Those that are typed come as one dictionary, `reading`, for `data.Options`.

    where: the flag of the condition on events, for a command that has another `--where`.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            reading = {name: value for name in _OPTIONS if (value := given.pop(f"log_{name}")) is not None}
            if "null_values" in reading:
                reading["null_values"] = tuple(text.strip() for text in reading["null_values"].split(","))
            command(**given, reading=reading)

        hints = get_type_hints(command, include_extras=True)
        parameters = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name])
            for one in inspect.signature(command).parameters.values()
            if one.name != "reading"
        ]
        for name, (kind, text) in _OPTIONS.items():
            flag = where if name == "where" else f"--{name.replace('_', '-')}"
            hint = Annotated[kind | None, typer.Option(flag, help=text)]  # type: ignore[valid-type]
            parameters.append(
                inspect.Parameter(f"log_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            )
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {one.name: one.annotation for one in parameters}
        return with_options

    return add

"""Errors that are the caller's to mend. The command line prints them as one line and exits with 2."""

import re

_FLAGS = "no-time|drop-missing|fold-users|dedupe|force"
# Options whose value is a word, and those whose value is quoted, a number, a date or a placeholder in capitals.
_WORDS = "user|item|time|title|catalogue|features|filter|split|preset|account"
_OTHERS = "time-format|null-values|where|min-events|min-user-events|date"
_VALUE = r"'[^']*'|\"[^\"]*\"|\d[\w:-]*|[A-Z]+\b"
_OPTION = re.compile(
    r"(?P<command>dpformer [a-z][^;`]*)"  # a command stays as it is typed
    rf"|(?<![\w-])--(?:(?P<flag>{_FLAGS})"
    rf"|(?P<word>{_WORDS})(?: (?P<its>{_VALUE}|[\w./:,-]*\w))?|(?P<other>{_OTHERS})(?: (?P<value>{_VALUE}))?)(?![\w-])"
)


class DPFormerError(Exception):
    """Base of all errors whose message alone tells what is wrong, where, and the cure.

    A message is written with options of the command line, `typed`. As text it has the parameters of Python.

    >>> str(DPFormerError("give --time bought, or --no-time; --min-events -1 is negative, see --where"))
    "give time='bought', or no_time=True; min_events -1 is negative, see where"
    """

    @property
    def typed(self) -> str:
        """The message with options as they are typed on the command line."""
        return super().__str__()

    def __str__(self) -> str:
        return _OPTION.sub(_parameter, self.typed)


def _parameter(option: re.Match[str]) -> str:
    if option["command"]:
        return option[0]
    name = (option["flag"] or option["word"] or option["other"]).replace("-", "_")
    value = "True" if option["flag"] else option["its"] or option["value"]
    if value is None:
        return name
    plain = option["flag"] or value[0] in "'\"" or value.isdecimal() or value == "N"
    return f"{name}={value if plain else repr(value)}"


class DataError(DPFormerError):
    """A log, a column, a row or a prepared folder is not what it has to be."""


class ClippingError(DPFormerError):
    """A gradient could reach a parameter without being in its norm; nothing was released."""


class PrivacyError(DPFormerError):
    """A privacy parameter is out of range, a budget would be overspent, or a record of it is not sound."""


class RankError(DPFormerError):
    """Another process of this training has ended, hangs, or is out of step."""

"""What a check is, and a list of them that goes on after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dpformer.errors import DPFormerError

Status = Literal["pass", "fail", "not checked"]
# What checked code may throw. It fails its check, and the others go on.
STOPPED = (
    *(DPFormerError, AssertionError, ArithmeticError, AttributeError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True)
class Check:
    """One property: the result in words and figures, or why it was not checked. false_alarm: see `Outcome`."""

    name: str
    status: Status
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)
    false_alarm: float = 0.0


class NotChecked(Exception):  # noqa: N818  (no error: a reason)
    """Why a property cannot be looked at here."""


@dataclass(frozen=True)
class Outcome:
    """What the function of a check returns. false_alarm: how often a sound run fails it; 0 where nothing is random."""

    good: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)
    false_alarm: float = 0.0


def agreement(pairs: dict[str, tuple[object, object]], detail: str) -> Outcome:
    """Good if the two values of each pair, the one found and the one stated, are equal."""
    wrong = [
        f"{name}: {found!r} found, {stated!r} stated" for name, (found, stated) in pairs.items() if found != stated
    ]
    return Outcome(not wrong, "; ".join(wrong) or detail, {"differences": wrong})


@dataclass
class Verification:
    """All checks of one subject."""

    subject: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.status == "fail"]

    def check(self, name: str, look: Callable[..., Outcome], *arguments: Any) -> bool:
        """Look at one property; an error in the checked code is a failure. Returns whether it passed."""
        try:
            outcome = look(*arguments)
        except NotChecked as reason:
            self.skip(str(reason), name)
            return False
        except STOPPED as error:
            outcome = Outcome(False, f"stopped: {type(error).__name__}: {' '.join(str(error).split())}")
        status: Status = "pass" if outcome.good else "fail"
        self.checks.append(Check(name, status, outcome.detail, outcome.figures, outcome.false_alarm))
        return outcome.good

    def skip(self, reason: str, *names: str) -> None:
        """Say why some properties are not looked at."""
        self.checks += [Check(name, "not checked", reason) for name in names]

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {"subject": self.subject, "passed": self.passed, "checks": [asdict(check) for check in self.checks]}

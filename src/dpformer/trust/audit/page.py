"""The audit for people: tables for the terminal and for documentation, and a page in the looks of a run's report."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from dpformer.report.page import render
from dpformer.svg import Axis, Bar, bars
from dpformer.trust.audit.bounds import CONFIDENCE, GAUSSIAN_CONFIDENCE
from dpformer.trust.audit.suite import NOT_ATTACKED, Attack, Audit, Finding

COLUMNS = ("audited", "claim", "attack", "any mechanism", "Gaussian", "of the claim", "planted defect", "control", "")


def rows(audits: Sequence[Audit]) -> list[tuple[str, ...]]:
    """One row an attack: the claim, both lower bounds of epsilon, the defect, both bounds of the control, the verdict."""
    return [_row(audit, attack) for audit in audits for attack in audit.attacks]


def _row(audit: Audit, attack: Attack) -> tuple[str, ...]:
    found, control = attack.found, attack.control
    return (
        *(audit.setting, f"{audit.epsilon:.2f}", attack.name, f"{found.epsilon_any:.2f}"),
        *(f"{found.epsilon_gaussian:.2f}", f"{100 * found.epsilon_gaussian / audit.epsilon:.0f} %", attack.defect),
        *(f"{largest(control):.1f}, {'caught' if attack.caught else 'NOT CAUGHT'}", attack.verdict),
    )


def largest(found: Finding) -> float:
    """The larger of the two bounds."""
    return max(found.epsilon_gaussian, found.epsilon_any)


def markdown(audits: Sequence[Audit]) -> str:
    """The table of attacks, bounds and controls."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows(audits))]) + "\n"


def html(audits: Sequence[Audit]) -> str:
    """A page of its own."""
    values = {"any": CONFIDENCE, "gaussian": GAUSSIAN_CONFIDENCE, "not_attacked": NOT_ATTACKED}
    return render("audit.html", audits=audits, plot=_plot, reading=_reading, **values)


def _plot(audit: Audit) -> Markup:
    series = {
        "claimed": [Bar(audit.epsilon) for _ in audit.attacks],
        "lower bound": [Bar(largest(attack.found)) for attack in audit.attacks],
        "control": [Bar(largest(attack.control)) for attack in audit.attacks],
    }
    top = max(2 * audit.epsilon, *(largest(attack.found) for attack in audit.attacks))
    axis = Axis("epsilon", low=0.0, high=top, tick="{:.2g}".format)
    return bars("claim, bounds and controls", [attack.name for attack in audit.attacks], series, axis)


def _reading(audit: Audit) -> str:
    """The result in one sentence or two."""
    best = max(largest(attack.found) for attack in audit.attacks)
    if any(attack.verdict == "REFUTED" for attack in audit.attacks):
        return f"The claim of epsilon {audit.epsilon:.2f} is refuted: an attack shows more than {best:.2f}. Do not publish."
    if not audit.passed:
        return "The strongest attack missed its planted defect, so nothing is said. Raise the number of fits."
    share = best / audit.epsilon
    return f"The attacks show that epsilon is above {best:.2f}, {share:.0%} of what is claimed, and nothing above the claim."

"""The plots of a report, from its facts. Each is an SVG, or None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from dpformer.evaluation.evaluate import SLICES
from dpformer.report.facts import Facts
from dpformer.svg import Axis, Bar, Series, bars, intervals, lines


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _steps(points: Sequence[tuple[float, float]]) -> Axis:
    return Axis("step", low=0.0, high=points[-1][0], tick="{:,.0f}".format)


def losses(run: Facts) -> Markup | None:
    """The loss over the steps; not private."""
    if not run.losses:
        return None
    return lines("loss over training steps", [Series("loss", run.losses)], _steps(run.losses), Axis(""))


def spent(run: Facts) -> Markup | None:
    """Epsilon over the steps, and the budget."""
    if not run.spent:
        return None
    last, budget = run.spent[-1][0], float(run.artifact.statement.budget)
    series = [Series("spent", run.spent), Series("budget", [(0.0, budget), (last, budget)], dashed=True)]
    return lines("epsilon spent over training steps", series, _steps(run.spent), Axis("", low=0.0))


def attack(run: Facts) -> Markup | None:
    """The most that any attacker finds, by how many non-members are flagged wrongly."""
    if not run.attack:
        return None
    guessing = [(a, a) for a, _ in run.attack]
    return lines(
        "most members found by any attack, by the share of non-members flagged wrongly",
        [Series("the best attack at most", run.attack), Series("guessing", guessing, dashed=True)],
        Axis("non-members flagged wrongly", log=True, low=1e-3, high=1.0, tick=_percent),
        Axis("", low=0.0, high=1.0, tick=_percent),
    )


def slices(run: Facts) -> Markup | None:
    """HIT@10 by the popularity of the target."""
    if run.metrics is None:
        return None
    parts = run.metrics["slices"]
    row = [Bar(**parts[name]["metrics"]["hit@10"]) for name in SLICES]
    groups = [f"{name} ({parts[name]['items']:,} items)" for name in SLICES]
    return bars("HIT@10 by popularity of the target", groups, {"HIT@10": row}, Axis("HIT@10", low=0.0, tick=_percent))


def long_tail(run: Facts) -> Markup | None:
    """Released popularity by rank."""
    if run.popularity is None:
        return None
    points = [(float(rank), share) for rank, share in enumerate(run.popularity, 1)]
    return lines(
        "item frequency by rank",
        [Series("frequency over that of the most frequent item", points)],
        Axis("item, by rank", log=True, low=1.0, tick="{:,.0f}".format),
        Axis("", log=True, high=1.0),
    )


def attention(run: Facts) -> Markup | None:
    """Attention to head, torso and tail over what uniform attention would give."""
    if run.lift is None:
        return None
    series = {name: [Bar(value) for value in row] for name, row in run.lift.items()}
    axis = Axis("attention over uniform attention", low=0.0, tick="{:.3g}".format)
    return bars("attention by popularity of the item attended to", list(SLICES), series, axis)


def comparison(runs: Sequence[Facts], metric: str) -> Markup:
    """The runs that have been evaluated, side by side."""
    rows = [(run.name, Bar(**run.metrics["masked"][metric])) for run in runs if run.metrics]
    return intervals(
        f"{metric} of each run", rows, Axis(f"{metric.upper()}, with 95 % interval", low=0.0, tick=_percent)
    )

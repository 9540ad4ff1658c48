"""The page itself: facts and plots into the template, everything escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from dpformer import __version__
from dpformer.errors import DPFormerError
from dpformer.evaluation import HEADLINE
from dpformer.privacy.wording import round_up
from dpformer.report import plots
from dpformer.report.facts import Facts, gather


@dataclass(frozen=True)
class Report:
    """A page and what it was made of."""

    html: str
    runs: tuple[Facts, ...]

    def figures(self) -> list[dict[str, Any]]:
        """The headline of each run, ready for JSON; metrics are not private."""
        return [
            {
                "run": str(run.folder),
                "model": run.artifact.model.spec.name,
                "epsilon": run.artifact.statement.epsilon,
                "delta": run.artifact.statement.delta,
                "metrics": run.metrics
                and {
                    "item": run.metrics["item"],
                    **{key: run.metrics["masked"][key] for key in HEADLINE},
                    "protocol": run.metrics["protocol"],
                    "not_private": True,
                },
            }
            for run in self.runs
        ]


def make_report(folders: Sequence[Path | str], histories: Sequence[str] = ()) -> Report:
    """One page about the runs in these folders. `histories`, ids or titles between commas, replace the sample histories.

    Only the run folders are read. Losses and metrics in them are not private, and the page marks them so.
    """
    if not folders:
        raise DPFormerError("name at least one run folder")
    paths = [Path(folder) for folder in folders]
    named = [path.resolve().name for path in paths]
    names = [name if named.count(name) == 1 else str(path) for name, path in zip(named, paths, strict=True)]
    runs = tuple(gather(path, name, histories) for path, name in zip(paths, names, strict=True))
    return Report(_render(runs), runs)


def _render(runs: tuple[Facts, ...]) -> str:
    protocols = {run.metrics["protocol"] for run in runs if run.metrics}
    return render(
        "report.html",
        runs=runs,
        plots=plots,
        headline=HEADLINE,
        comparable=len(protocols) <= 1,
        any_metrics=bool(protocols),
    )


def render(template: str, **values: Any) -> str:
    """A page of a template in `templates/`, in the looks of all reports."""
    return _environment().get_template(template).render(style=Markup(_read("style.css")), version=__version__, **values)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": _percent, "percent_up": _percent_up, "number": _number, "bound": _bound}
    return environment


def _read(name: str) -> str:
    return files("dpformer.report").joinpath("templates", name).read_text(encoding="utf-8")


def _percent(value: float, digits: int = 2) -> str:
    """A share in percent; a mean over no users is a dash."""
    return "–" if value != value else f"{100 * value:.{digits}f}"


def _percent_up(value: float) -> str:
    """An upper bound in whole percent, rounded up."""
    return f"{math.ceil(round(100 * value, 9))}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _bound(value: float | str) -> str:
    """An epsilon, rounded up as in the statement: a smaller one would promise too much."""
    return value if isinstance(value, str) else f"{round_up(value, 4):.4g}"

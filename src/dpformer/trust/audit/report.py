"""The audit for people: tables for the terminal, and a folder with audit.json, audit.md and audit.svg."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.table import Table

from dpformer.files import write_file, write_json
from dpformer.trust.audit.suite import Audit

Rows = list[tuple[str, ...]]


def sections(result: Audit) -> dict[str, tuple[tuple[str, ...], Rows]]:
    """Title to columns and rows; the same for the terminal and for Markdown."""
    step, run = result.step, result.one_run
    one = f"{run.correct} of {run.guesses} guesses right, {run.canaries} canaries, {run.steps} steps"
    claims: Rows = [
        (
            "single step, white-box",
            f"mu = 1 / sigma = {step.claimed_mu:.3f}",
            f"mu {step.mu:.3f} in [{step.low:.3f}, {step.high:.3f}] ({step.confidence:.1%}, {step.trials:,} sums each way)",
            _verdict(step.passed),
        ),
        ("sampler", "Poisson", result.sampling[1], _verdict(result.sampling[0])),
        (
            "whole training, (epsilon, delta)",
            f"epsilon {run.claimed_epsilon:.2f} at {run.delta:g}",
            f"epsilon above {run.epsilon_low:.2f} (95%; {one})",
            _verdict(run.epsilon_low <= run.claimed_epsilon),
        ),
        (
            "whole training, mu-GDP",
            f"mu {run.claimed_mu:.2f}",
            f"mu above {run.mu_low:.2f}, that is epsilon {run.gdp_epsilon_low:.2f} at {run.delta:g} (95%)",
            _verdict(run.mu_low <= run.claimed_mu),
        ),
    ]
    attacks: Rows = [
        (
            attack.model,
            f"{attack.epsilon:.3g}" if isinstance(attack.epsilon, float) else attack.epsilon,
            f"{attack.auc:.3f} (above {attack.auc_low:.3f})",
            f"{attack.true_positives:.1%}",
            f"{attack.advantage:.3f} (above {attack.advantage_low:.3f})",
            f"{attack.claimed_advantage:.3f}",
            _verdict(attack.passed),
        )
        for attack in result.attacks
    ]
    controls: Rows = [
        (c.name, c.defect, c.seen, "" if c.power is None else f"{c.power:.4f}", "caught" if c.caught else "NOT CAUGHT")
        for c in result.controls
    ]
    return {
        "The claim under attack": (("audit", "claimed", "found", ""), claims),
        "Membership attack on the released model": (
            ("model", "epsilon", "AUC", "true positives at 5% false", "advantage", "allowed", ""),
            attacks,
        ),
        "Negative controls: defects put in on purpose": (("control", "defect", "seen", "power", ""), controls),
    }


def tables(result: Audit) -> list[Table]:
    """For the terminal."""
    shown = []
    for title, (columns, rows) in sections(result).items():
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        shown.append(table)
    return shown


def markdown(result: Audit) -> str:
    """The report as a page."""
    lines = ["# Privacy audit", "", f"Audited: {result.setting}; seed {result.seed}.", ""]
    lines += ["**Passed**: the claim stands, and every control was caught." if result.passed else "**FAILED**", ""]
    lines += [f"- {problem}" for problem in result.problems] + ([""] if result.problems else [])
    for title, (columns, rows) in sections(result).items():
        lines += [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    lines += ["![The one-run audit](audit.svg)", ""]
    lines += ["All of it was computed on people's data without noise: not private. Keep it to yourself.", ""]
    return "\n".join(lines)


def draw(result: Audit, path: Path) -> None:
    """Scores of canaries that were in and out; and the lower bounds beside the claim."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
    left, right = figure.subplots(1, 2)
    run = result.one_run
    bins = np.linspace(run.scores.min(), run.scores.max(), 30).tolist()
    left.hist(run.scores[~run.inside], bins, alpha=0.6, label="canary out", color="#1b4f72")
    left.hist(run.scores[run.inside], bins, alpha=0.6, label="canary in", color="#d95f02")
    left.set(title="one training: score of each canary", xlabel="score", ylabel="canaries")
    left.legend(frameon=False)
    names = ["claimed", "found, mu-GDP", "found, (eps, delta)"]
    values = [run.claimed_epsilon, run.gdp_epsilon_low, run.epsilon_low]
    right.barh(names[::-1], values[::-1], color=["#999999", "#d95f02", "#1b4f72"])
    for place, value in enumerate(values[::-1]):
        right.text(value, place, f" {value:.2f}", va="center")
    right.set(title=f"epsilon at delta {run.delta:g}: claim and lower bounds", xlim=(0, 1.15 * max(values)))
    figure.savefig(path, format="svg", metadata={"Date": None})


def write_report(result: Audit, folder: Path) -> None:
    """audit.json, audit.md and audit.svg, for the owner only."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", result.to_json(), mode=0o600)
    write_file(folder / "audit.md", markdown(result).encode(), mode=0o600)
    draw(result, folder / "audit.svg")


def _verdict(passed: bool) -> str:
    return "holds" if passed else "REFUTED"

"""The audit for people: tables for the terminal, and a folder with audit.json, audit.md and audit.svg."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from dpformer.files import write_file, write_json
from dpformer.svg import Axis, Bar, Series, alone, bars, lines
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
    run = result.one_run
    edges = np.linspace(run.scores.min(), run.scores.max(), 31)
    middles = (edges[1:] + edges[:-1]) / 2
    series = [
        Series(name, list(zip(middles.tolist(), np.histogram(scores, edges)[0].astype(float).tolist(), strict=True)))
        for name, scores in (("canary in", run.scores[run.inside]), ("canary out", run.scores[~run.inside]))
    ]
    scores = lines("canaries by score", series, Axis("score"), Axis("canaries", low=0.0))
    found = {
        "claimed": run.claimed_epsilon,
        "found, mu-GDP": run.gdp_epsilon_low,
        "found, (eps, delta)": run.epsilon_low,
    }
    axis = Axis(f"epsilon at delta {run.delta:g}: claim and lower bounds", low=0.0, tick="{:.2f}".format)
    claim = bars("claim and lower bounds", list(found), {"epsilon": [Bar(value) for value in found.values()]}, axis)
    path.write_text(alone(scores, claim), encoding="utf-8")


def write_report(result: Audit, folder: Path) -> None:
    """audit.json, audit.md and audit.svg, for the owner only."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", result.to_json(), mode=0o600)
    write_file(folder / "audit.md", markdown(result).encode(), mode=0o600)
    draw(result, folder / "audit.svg")


def _verdict(passed: bool) -> str:
    return "holds" if passed else "REFUTED"

"""The figures that explain: `python scripts/draw_concepts.py docs/figures` writes attack.svg."""

import sys
from pathlib import Path

import numpy as np

from dpformer.privacy import Charge, epsilon
from dpformer.privacy.attack_bounds import delta_curve, power
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.svg import Axis, Series, alone, lines

DELTA = 1e-5


def attack() -> str:
    """The most true positives of any attack on one Gaussian release, by false positives."""
    alphas = np.geomspace(1e-3, 1, 81)
    series = []
    for budget in (1.0, 3.0, 8.0):
        release = [Charge("one", gaussian_multiplier(budget, DELTA))]
        reached = power(alphas.tolist(), *delta_curve(release, epsilon(release, DELTA)))
        series.append(Series(f"epsilon {budget:g}", list(zip(alphas.tolist(), reached.tolist(), strict=True))))
    series.append(Series("guessing", [(a, a) for a in alphas.tolist()], dashed=True))

    def percent(value: float) -> str:
        return f"{100 * value:g}%"

    plot = lines(
        "members found at most, by the share of non-members flagged wrongly",
        series,
        Axis("non-members flagged wrongly", log=True, low=1e-3, high=1.0, tick=percent),
        Axis("", low=0.0, high=1.0, tick=percent),
    )
    return alone(plot)


if __name__ == "__main__":
    (Path(sys.argv[1]) / "attack.svg").write_text(attack())

"""The figures that explain: `python scripts/draw_concepts.py docs/figures` writes attack.svg."""

import sys
from pathlib import Path

import numpy as np

from dpformer.privacy import Charge, epsilon
from dpformer.privacy.attack_bounds import delta_curve, power
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.report.svg import Axis, Series, lines

DELTA = 1e-5
# The plot alone, outside of a page: its own colours, light or dark by the reader's setting.
STYLE = """
svg{background:#fff}text{fill:#444;font:12px system-ui,"DejaVu Sans",sans-serif}.grid{stroke:#ddd;fill:none}
.line{fill:none;stroke-width:2.2}.dashed{stroke-dasharray:5 4}
.s0{stroke:#2f8a57}.s1{stroke:#1f77b4}.s2{stroke:#c2571a}.s3{stroke:#888}
@media(prefers-color-scheme:dark){svg{background:#1b1e22}text{fill:#ccc}.grid{stroke:#444}
.s0{stroke:#7fd1a0}.s1{stroke:#7db8ee}.s2{stroke:#f0a268}}
"""


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
        "members found at most, by the share of others accused wrongly",
        series,
        Axis("others accused wrongly", log=True, low=1e-3, high=1.0, tick=percent),
        Axis("", low=0.0, high=1.0, tick=percent),
    )
    svg = str(plot).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return svg.replace(">", f"><style>{STYLE}</style>", 1)


if __name__ == "__main__":
    (Path(sys.argv[1]) / "attack.svg").write_text(attack() + "\n")

"""The paper's table of error propagation through activations: sampled variances beside the analytic one.

The paper writes the inputs as N(0, 0.01), N(0, 0.1), N(0, 1); its numbers are those of *standard deviations* 0.01, 0.1 and 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from dpformer.models.error import relu_moments
from dpformer_experiments.reproduce.page import Page

SAMPLES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
SHOWN = (100, 10_000, 1_000_000)  # those that fit 80 columns; the others are in the JSON
PAPER = {0.01: 3.40e-5, 0.1: 0.0034, 1.0: 0.3408}


def run(seed: int = 0) -> dict[str, Any]:
    """Variances after ReLU and GELU, for each input's standard deviation and number of samples."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for std, printed in PAPER.items():
        analytic = float(
            relu_moments(torch.tensor(0.0, dtype=torch.float64), torch.tensor(std**2, dtype=torch.float64))[1]
        )
        for name, function in (("ReLU", F.relu), ("GELU", F.gelu)):
            sampled = {}
            for n in SAMPLES:
                x = std * torch.randn(n, generator=generator, dtype=torch.float64)
                sampled[str(n)] = float(function(x).var())
            rows.append({"std": std, "activation": name, "sampled": sampled, "analytic": analytic, "paper": printed})
    return {"rows": rows}


def page(figures: dict[str, Any]) -> Page:
    """The figures in the paper's layout."""
    headings = ("std", "activation", *(f"{n:,}" for n in SHOWN), "analytic", "paper")
    rows = []
    for row in figures["rows"]:
        numbers = [*(row["sampled"][str(n)] for n in SHOWN), row["analytic"], row["paper"]]
        rows.append((f"{row['std']:g}", row["activation"], *(_number(x) for x in numbers)))
    title = "Variance after an activation, inputs N(0, std^2)"
    return Page(title, "dpformer reproduce error-table -o docs/results", headings, rows)


def _number(x: float) -> str:
    return f"{x:.2e}" if x < 1e-3 else f"{x:.4f}"

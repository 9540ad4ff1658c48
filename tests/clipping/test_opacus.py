"""Against Opacus' per-sample gradients (hooks), which are exact for a module-tied model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpformer import PhantomClipping

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore")


class ModuleTied(nn.Module):
    """Only modules that Opacus knows, one head weight tied to the embedding."""

    def __init__(self, M=23, d=8, L=10):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(M, d), nn.Embedding(L, d)
        self.norm, self.q, self.k, self.v = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.head = nn.Linear(d, M, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, s):
        x = self.embedding(s) + self.positions(torch.arange(s.shape[1]).expand_as(s))
        h = self.norm(x)
        return self.head(x + F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True))


def losses(model, s):
    return F.cross_entropy(model(s)[:, :-1].transpose(1, 2), s[:, 1:], reduction="none").sum(1)


def test_equal_to_opacus_per_sample_gradients():
    torch.manual_seed(0)
    model = ModuleTied().double()
    s = torch.randint(0, 23, (6, 10))
    norms = PhantomClipping(model, rule="flat").backward(lambda: losses(model, s))
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    hooked = opacus.GradSampleModule(model, loss_reduction="sum")
    losses(hooked, s).sum().backward()
    samples = {n: p.grad_sample for n, p in model.named_parameters()}
    theirs = torch.stack([g.flatten(1).square().sum(1) for g in samples.values()]).sum(0).sqrt()
    torch.testing.assert_close(norms, theirs, rtol=1e-9, atol=0)
    factors = (1 / theirs).clamp(max=1)
    for n, g in samples.items():
        torch.testing.assert_close(ours[n], torch.einsum("b,b...->...", factors, g), rtol=3e-6, atol=1e-9)


def test_the_documented_failures_are_reproducible():
    """docs/clipping.md shows what this script prints."""
    script = Path(__file__).parents[2] / "attacks" / "peer_ties.py"
    printed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    rows = {tuple(line[:31].split(maxsplit=1)): line[31:].split() for line in printed.splitlines()[1:]}
    rows_by_method = {(tie, method.strip()): row for (tie, method), row in rows.items()}
    assert float(rows_by_method["FunctionalTie", "Opacus ghost"][0]) > 5
    assert float(rows_by_method["FunctionalTie", "Opacus hooks"][1]) < 0.5
    assert "refuses" in " ".join(rows_by_method["ModuleTie", "Opacus ghost"])
    for tie in ("FunctionalTie", "ModuleTie"):
        contribution, cosine = map(float, rows_by_method[tie, "Phantom Clipping"])
        assert 0.999 < contribution <= 1
        assert cosine > 0.9999

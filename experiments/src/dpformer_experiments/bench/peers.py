"""Other libraries on the same users, with their own clipping, noise and optimiser; skipped, with a reason, if not installed.

    opacus hooks     per-sample gradients, module-tied; the Trainer's micro-batches, at most 32 users of one at a time, since each
                     holds a gradient of the table
    opacus padded    the same as it is usually run: all users padded to L, as many at once as fit
    opacus ghost     ghost clipping; it refuses ties, so untied at half the dimension (the paper's comparison)
    fastdp           book-keeping (MixOpt); wrong on ties (see docs/clipping.md), so untied at half the dimension too

They use hooks on modules, so the model is written with modules that they support: same layers and sizes as ours.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer_experiments.bench.contenders import BLOCKS, SEED, SIGMA, D, Summed, in_rows, inputs_and_targets
from dpformer_experiments.bench.workloads import Workload

AT_ONCE = 32


def missing() -> dict[str, str]:
    """Contenders that are not installed, with the reason."""
    reasons = {}
    if find_spec("opacus") is None:
        reasons = dict.fromkeys(("opacus hooks", "opacus padded", "opacus ghost"), "not installed: pip install opacus")
    if find_spec("fastDP") is None:
        reasons["fastdp"] = "not installed: it is not on the package index; put a copy of its source on PYTHONPATH"
    return reasons


class Hooked(nn.Module):
    """The Transformer of `dpformer.models.transformer` (pre-norm, one head) in modules that Opacus and fastDP support."""

    def __init__(self, workload: Workload, d: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        M = workload.items + 1
        self.embedding, self.positions = nn.Embedding(M, d), nn.Embedding(workload.L, d)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(_Block(d) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, M, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, s: Tensor) -> Tensor:
        """Item ids `[B, L]` to logits `[B, L, M]`."""
        x = self.embedding(s) + self.positions(torch.arange(s.shape[1]).expand_as(s).contiguous())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h)[:, None] for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x + self.down(F.relu(self.up(self.norm2(x))))


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss over each user's tokens, `[B]`."""
    s, y, w = inputs_and_targets(tokens)
    logits = model(s.contiguous())  # Opacus needs contiguous inputs
    return (F.cross_entropy(logits.transpose(1, 2), y, reduction="none") * w).sum(1)


class OpacusHooks(Summed):
    """`GradSampleModule` and `DPOptimizer`, as in its documentation; parts of a batch by `signal_skip_step`."""

    def __init__(self, workload: Workload, batch: int, take: int | None = None) -> None:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        model = Hooked(workload, D, tied=True)
        super().__init__(workload, batch, model, take)
        self.hooked = GradSampleModule(model, loss_reduction="sum")
        self.optimizer = DPOptimizer(
            self.optimizer, noise_multiplier=SIGMA, max_grad_norm=1.0, expected_batch_size=batch, loss_reduction="sum"
        )

    def clear(self) -> None:
        """Use Opacus' own function."""
        self.optimizer._is_last_step_skipped = False
        self.optimizer.zero_grad()

    def pieces(self, users: np.ndarray) -> list[np.ndarray]:
        """Micro-batches of at most 32 users."""
        return [part for piece in super().pieces(users) for part in in_rows(piece, AT_ONCE)]

    def add(self, tokens: Tensor) -> None:
        """Per-sample gradients, clipped and summed."""
        losses(self.hooked, tokens).sum().backward()
        self.optimizer.signal_skip_step(True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """What `DPOptimizer.step` does after the last part."""
        self.optimizer.add_noise()
        for p in self.parameters:
            assert p.grad is not None
            p.grad.div_(self.batch)
        self.optimizer.original_optimizer.step()


class OpacusPadded(OpacusHooks):
    """As many users at once as fit into memory, padded to L."""

    padded = True

    def __init__(self, workload: Workload, batch: int, take: int | None = None, rows: int = AT_ONCE) -> None:
        super().__init__(workload, batch, take)
        self.rows = rows

    def pieces(self, users: np.ndarray) -> list[np.ndarray]:
        """Users in any order of length."""
        return in_rows(users, self.rows)


class OpacusGhost(Summed):
    """Ghost clipping: a backward pass for the norms, another for the weighted sum."""

    private = True

    def __init__(self, workload: Workload, batch: int, take: int | None = None) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        model = Hooked(workload, D // 2, tied=False)
        super().__init__(workload, batch, model, take)
        self.hooked = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
        )

    def add(self, tokens: Tensor) -> None:
        """Do the same as `DPLossFastGradientClipping`, but keep the sum of the earlier pieces."""
        self.hooked.enable_hooks()
        of_users = losses(self.hooked, tokens)
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        of_users.sum().backward(retain_graph=True)
        factors = self.hooked.get_clipping_coef().detach()
        for p, grad in zip(self.parameters, before, strict=True):
            p.grad = grad
        self.hooked.disable_hooks()
        (of_users * factors).sum().backward()


class FastDP(Summed):
    """fastDP's engine, attached to the optimiser."""

    def __init__(self, workload: Workload, batch: int, take: int | None = None) -> None:
        from fastDP import PrivacyEngine

        model = Hooked(workload, D // 2, tied=False)
        super().__init__(workload, batch, model, take)
        settings: dict[str, Any] = {
            "clipping_fn": "automatic",
            "clipping_mode": "MixOpt",
            "clipping_style": "all-layer",
        }
        with contextlib.redirect_stdout(io.StringIO()):
            engine = PrivacyEngine(
                model,
                batch_size=batch,
                sample_size=len(workload.sequences),
                epochs=1,
                noise_multiplier=SIGMA,
                max_grad_norm=1.0,
                loss_reduction="sum",
                **settings,
            )
            engine.attach(self.optimizer)

    def clear(self) -> None:
        """fastDP stores its sums itself."""
        self.optimizer.zero_grad()

    def add(self, tokens: Tensor) -> None:
        """Norms and the clipped sum in one backward pass."""
        losses(self.model, tokens).sum().backward()

    def finish(self) -> None:
        """Use fastDP's noise, and Adam."""
        self.optimizer.step()

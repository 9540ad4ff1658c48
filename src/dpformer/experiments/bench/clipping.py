"""Per-sample clipping of a tied Transformer: Phantom Clipping against ordinary training and what else there is.

Work: one pass over the same users, cut into the same micro-batches by length, gradients only (no noise, no optimiser).

    phantom        Phantom Clipping, the catalogue head, tied
    plain          ordinary non-private PyTorch: autograd, F.cross_entropy on the tokens that are not padding, tied
    opacus hooks   Opacus' per-sample gradients, module-tied; 32 users at a time: each holds a gradient of the table
    opacus ghost   Opacus' ghost clipping; it refuses ties, so untied at half the width (the paper's comparison)
    naive loop     one user at a time

Opacus is left out where it is not installed. Times are
taken in one process, interleaved, and compared as ratios; memory in a process each.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.clipping import PhantomClipping, TiedCrossEntropy
from dpformer.experiments.bench.child import resident_mb, run_child


@dataclass(frozen=True)
class Workload:
    """Sizes of a data set: users' lengths are log-normal around `median`, items Zipf."""

    L: int
    M: int
    median: float
    spread: float
    users: int
    tokens: int = 4096
    d: int = 64
    naive_users: int = 24


WORKLOADS = {
    "ml-1m": Workload(L=200, M=3416, median=96, spread=1.0, users=96, naive_users=8),
    "games": Workload(L=50, M=23715, median=6, spread=0.6, users=512, naive_users=8),
}
QUICK = {
    "ml-1m": Workload(L=200, M=3416, median=96, spread=1.0, users=24, tokens=2048, naive_users=4),
    "games": Workload(L=50, M=23715, median=6, spread=0.6, users=64, tokens=512, naive_users=4),
}
CONTENDERS = ["phantom", "plain", *(["opacus hooks", "opacus ghost"] if find_spec("opacus") else []), "naive loop"]

Batch = tuple[Tensor, Tensor, Tensor]  # inputs, targets, weights, each [B, L]


class Transformer(nn.Module):
    """Two pre-norm blocks with one head; only modules that Opacus knows too."""

    def __init__(self, M: int, L: int, d: int, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(M, d), nn.Embedding(L, d)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(_Block(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, M, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, s: Tensor) -> Tensor:
        """`[B, L]` to `[B, L, d]`."""
        x = self.embedding(s) + self.positions(torch.arange(s.shape[1], device=s.device).expand_as(s).contiguous())
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, s: Tensor) -> Tensor:
        """`[B, L]` to logits `[B, L, M]`."""
        return self.head(self.hidden(s))


class _Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h)[:, None] for f in (self.q, self.k, self.v))  # one head
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x + self.down(F.relu(self.up(self.norm2(x))))


def make_batches(w: Workload, seed: int = 0) -> list[Batch]:
    """Users of all lengths, sorted by length and cut by a token budget."""
    g = torch.Generator().manual_seed(seed)
    drawn = torch.exp(torch.randn(w.users, generator=g) * w.spread) * w.median
    lengths: list[int] = drawn.round().long().clamp(1, w.L).sort(descending=True).values.tolist()
    weights = 1.0 / torch.arange(1, w.M, dtype=torch.float64)
    batches, k = [], 0
    while k < w.users:
        T = lengths[k]
        part = lengths[k : k + max(1, w.tokens // T)]
        s = 1 + torch.multinomial(weights, len(part) * (T + 1), replacement=True, generator=g).view(len(part), T + 1)
        used = torch.arange(T) < torch.tensor(part)[:, None]
        inputs, targets = s[:, :-1] * used, s[:, 1:] * used
        batches.append((inputs, targets, used / used.sum(1, keepdim=True)))
        k += len(part)
    return batches


def contender(name: str, w: Workload) -> Callable[[list[Batch]], None]:
    """A function that adds up the (clipped) gradients of all users of some batches."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    match name:
        case "phantom":
            return _phantom(Transformer(w.M, w.L, w.d))
        case "plain":
            return _plain(Transformer(w.M, w.L, w.d))
        case "opacus hooks":
            return _opacus_hooks(Transformer(w.M, w.L, w.d))
        case "opacus ghost":
            return _opacus_ghost(Transformer(w.M, w.L, w.d // 2, tied=False))
        case _:
            return _naive(Transformer(w.M, w.L, w.d))


def _phantom(model: Transformer) -> Callable[[list[Batch]], None]:
    head, clipping = TiedCrossEntropy(), PhantomClipping(model)

    def losses(s: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return head(model.hidden(s), model.embedding.weight, y, w)

    def run(batches: list[Batch]) -> None:
        model.zero_grad(set_to_none=False)
        for s, y, w in batches:
            clipping.backward(partial(losses, s, y, w))

    return run


def _plain(model: Transformer) -> Callable[[list[Batch]], None]:
    def run(batches: list[Batch]) -> None:
        model.zero_grad(set_to_none=False)
        for s, y, w in batches:
            used = w > 0
            losses = F.cross_entropy(F.linear(model.hidden(s)[used], model.embedding.weight), y[used], reduction="none")
            (losses * w[used]).sum().backward()

    return run


def _losses(model: nn.Module, batch: Batch) -> Tensor:
    s, y, w = batch
    return (F.cross_entropy(model(s).transpose(1, 2), y, reduction="none") * w).sum(1)


def _opacus_hooks(model: Transformer) -> Callable[[list[Batch]], None]:
    from opacus import GradSampleModule

    hooked = GradSampleModule(model, loss_reduction="sum")

    def run(batches: list[Batch]) -> None:
        model.zero_grad(set_to_none=False)
        for batch in batches:
            for k in range(0, len(batch[0]), 32):
                part = (batch[0][k : k + 32], batch[1][k : k + 32], batch[2][k : k + 32])
                total = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
                _losses(hooked, part).sum().backward()
                parameters: list[Any] = list(model.parameters())  # Opacus glues `grad_sample` onto them
                norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters]).norm(dim=0)
                factors = 1 / (norms + 0.01)
                for p, t in zip(parameters, total, strict=True):
                    p.grad = t + torch.einsum("b,b...->...", factors, p.grad_sample)
                    p.grad_sample = None

    return run


def _opacus_ghost(model: Transformer) -> Callable[[list[Batch]], None]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    hooked = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )

    def run(batches: list[Batch]) -> None:
        model.zero_grad(set_to_none=False)
        for batch in batches:
            hooked.enable_hooks()
            losses = _losses(hooked, batch)
            total = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            losses.sum().backward(retain_graph=True)
            factors = hooked.get_clipping_coef().detach()
            for p, t in zip(model.parameters(), total, strict=True):
                p.grad = t
            hooked.disable_hooks()
            (losses * factors).sum().backward()

    return run


def _naive(model: Transformer) -> Callable[[list[Batch]], None]:
    parameters = list(model.parameters())

    def run(batches: list[Batch]) -> None:
        model.zero_grad(set_to_none=False)
        for s, y, w in batches:
            for i in range(len(s)):
                n = int((w[i] > 0).sum())
                one = (s[i : i + 1, :n], y[i : i + 1, :n], w[i : i + 1, :n])
                gradients = torch.autograd.grad(_losses(model, one).sum(), parameters)
                factor = 1 / (torch.stack([g.norm() for g in gradients]).norm() + 0.01)
                for p, g in zip(parameters, gradients, strict=True):
                    p.grad = g * factor if p.grad is None else p.grad.add_(g * factor)

    return run


def measure_memory(name: str, workload: dict[str, Any]) -> dict[str, float]:
    """Peak memory of one contender, with and without what the process holds before (interpreter, torch, data)."""
    w = Workload(**workload)
    batches = _for(name, make_batches(w), w)
    before = resident_mb()
    contender(name, w)(batches)
    return {"before_mb": before}


def _for(name: str, batches: list[Batch], w: Workload) -> list[Batch]:
    """The naive loop takes minutes: it gets the first few users of each batch, and is compared per user and token."""
    if name != "naive loop":
        return batches
    take = max(1, w.naive_users // len(batches))
    return [(s[:take], y[:take], u[:take]) for s, y, u in batches]


def measure_times(workload: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds per token of each contender, all interleaved in this process: `[repeats]` each."""
    w = Workload(**workload)
    batches = make_batches(w)
    runs = {name: (contender(name, w), _for(name, batches, w)) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for repeat in range(repeats + 1):
        for name, (run, given) in runs.items():
            start = time.perf_counter()
            run(given)
            tokens = sum(int((u > 0).sum()) for _, _, u in given)
            if repeat:  # the first warms caches and memory up
                times[name].append((time.perf_counter() - start) / tokens)
    tokens = sum(int((u > 0).sum()) for _, _, u in batches)
    return {"times": times, "tokens": tokens, "users": w.users, "batches": len(batches)}


def run(quick: bool) -> dict[str, Any]:
    """Figures by workload and contender."""
    figures: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "workloads": {}}
    here = "dpformer.experiments.bench.clipping"
    for key, workload in (QUICK if quick else WORKLOADS).items():
        sizes = asdict(workload)
        timed = run_child(f"{here}:measure_times", workload=sizes, repeats=2 if quick else 4)
        rows: dict[str, Any] = {}
        for name in CONTENDERS:
            memory = run_child(f"{here}:measure_memory", name=name, workload=sizes)
            plain, own = timed["times"]["plain"], timed["times"][name]
            ratios = [p / t for p, t in zip(plain, own, strict=True)]
            rows[name] = {
                "tokens_per_second": 1 / statistics.median(own),
                "speed_over_plain": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
                "peak_mb": memory["peak_mb"],
                "extra_mb": memory["peak_mb"] - memory["before_mb"],
            }
        for row in rows.values():
            row["memory_over_plain"] = row["peak_mb"] / rows["plain"]["peak_mb"]
        figures["workloads"][key] = {
            "sizes": sizes,
            "tokens": timed["tokens"],
            "batches": timed["batches"],
            "rows": rows,
        }
    return figures


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table(title="Clipped gradients of a tied Transformer (d 64, 2 blocks)", title_justify="left")
    for column in ("workload", "method", "tokens/s", "speed over plain", "(spread)", "peak MB", "memory over plain"):
        table.add_column(column, justify="left" if column in ("workload", "method") else "right")
    for key, found in figures["workloads"].items():
        for name, row in found["rows"].items():
            low, high = row["spread"]
            table.add_row(
                key,
                name,
                f"{row['tokens_per_second']:,.0f}",
                f"{row['speed_over_plain']:.2f}",
                f"{low:.2f}-{high:.2f}",
                f"{row['peak_mb']:,.0f}",
                f"{row['memory_over_plain']:.2f}",
            )
    return table

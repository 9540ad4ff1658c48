"""Break down the time of a private step, and compare the head with the speed of the matrix products it consists of.

During the measurement, functions of the library are wrapped in timers; the library itself has none. The time of a part excludes
the parts inside it. With two parallel workers, a second of one worker counts half, and waiting for the workers counts nothing. So
the parts sum to the time of the step if all workers are busy to its end.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from dpformer.clipping import phantom
from dpformer.clipping.gradient import Formed, Pairs
from dpformer.clipping.tied import TiedGradient
from dpformer.clipping.tied_head import HeadPass
from dpformer.clipping.use import Use
from dpformer.fit import gradient_sum
from dpformer.fit.dpsgd import Trainer
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.workers import WORKERS, Team, Worker
from dpformer.models.transformer import Transformer
from dpformer.privacy import Curator
from dpformer.privacy.ledger import Ledger
from dpformer.training import clipped_sum
from dpformer.training.groups import Groups
from dpformer_experiments.bench import workloads
from dpformer_experiments.bench.contenders import D, Own

HEAD, NORM_SUM, BLOCKS, NORMS = (
    "head: logits and gradient at H",
    "head: norms and sum",
    "blocks",
    "other norms and sums",
)
NOISE, OPTIMISER, COLLATION, LEDGER, GUARD = "noise", "optimiser", "sampling and collation", "ledger", "guard"
GRID, HASH = "sums on the grid", "hash of the sum, adding the noise"
OTHER, WAITING = "other", "waiting for workers"
# What is timed: the owner, the name in it, the part. A name that no longer exists is an error.
PLACES: list[tuple[Any, str, str]] = [
    (HeadPass, "__init__", HEAD),
    (TiedGradient, "clip", NORM_SUM),
    (Pairs, "measure", NORMS),
    (Pairs, "add", NORMS),
    (Formed, "add", NORMS),
    (Use, "settle", NORMS),
    (phantom.PhantomClipping, "_gradients", NORMS),
    (Transformer, "states", BLOCKS),
    (phantom.PhantomClipping, "_differentiate", BLOCKS),
    (phantom, "WeightedPass", GUARD),
    (Worker, "add", OTHER),
    (Worker, "sum", GRID),
    (clipped_sum, "add_rounded", GRID),
    (Team, "sum", GRID),
    (Team, "_side_by_side", WAITING),
    (GradientSum, "sum", GRID),
    (Groups, "split", COLLATION),
    (gradient_sum, "micro_batches", COLLATION),
    (Curator, "ask", HASH),
    (Ledger, "charge", LEDGER),
    (Trainer, "gradients", OPTIMISER),
    (Trainer, "update", OPTIMISER),
]


class Clock:
    """Seconds by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._own, self._lock = threading.local(), threading.Lock()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block."""
        share = 1.0 if threading.current_thread() is threading.main_thread() else 1 / WORKERS
        inside: list[float] = self._own.__dict__.setdefault("inside", [])
        inside.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            with self._lock:
                self.seconds[name] += share * (whole - inside.pop())
            if inside:
                inside[-1] += whole

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function`, timed; of a generator, the making of each element."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                result = function(*args, **kwargs)
            return self._each(result, name) if isinstance(result, Iterator) else result

        return timed

    def _each(self, elements: Iterator[Any], name: str) -> Iterator[Any]:
        while True:
            with self.part(name):
                element = next(elements, None)
            if element is None:
                return
            yield element


@contextlib.contextmanager
def timers(curator: Curator[Any]) -> Iterator[Clock]:
    """Wrap all `PLACES`, and this Curator's noise and draws, in a clock."""
    clock = Clock()
    with contextlib.ExitStack() as stack:
        for owner, name, part in [*PLACES, (curator, "_noise", NOISE), (curator, "_draw", COLLATION)]:
            stack.enter_context(patch.object(owner, name, clock.around(getattr(owner, name), part)))
        yield clock


def measure(path: str, batch: int, steps: int) -> dict[str, Any]:
    """Shares of a private step by part (medians), and the speed of the head / that of matrix products measured in between."""
    w = workloads.load(path)
    contender = Own(w, batch, private=True)
    contender.step()
    steps_made: list[dict[str, float]] = []
    efficiencies, speeds = [], []
    for _ in range(steps):
        before = gemm_speed(w.items + 1)
        with timers(contender.curator) as clock, clock.part(OTHER):
            turn = contender.step()
        clock.seconds.pop(WAITING, None)
        speed = (before + gemm_speed(w.items + 1)) / 2
        whole = sum(clock.seconds.values())
        steps_made.append({part: seconds / whole for part, seconds in clock.seconds.items()} | {"seconds": whole})
        flops = 6 * w.tokens(turn.users) * (w.items + 1) * D
        efficiencies.append(flops / (clock.seconds[HEAD] + clock.seconds[NORM_SUM]) / speed)
        speeds.append(speed)
    parts = sorted({part for shares in steps_made for part in shares} - {"seconds"})
    shares = {part: statistics.median(shares.get(part, 0.0) for shares in steps_made) for part in parts}
    noise = [sum(shares.get(part, 0.0) for part in (NOISE, HASH, OPTIMISER)) for shares in steps_made]
    return {
        "batch": batch,
        "step_seconds": statistics.median(shares["seconds"] for shares in steps_made),
        "shares": dict(sorted(shares.items(), key=lambda pair: -pair[1])),
        "noise_optimizer_share": _spread(noise),
        "gemm_gflops": statistics.median(speeds) / 1e9,
        "head_gemm_efficiency": _spread(efficiencies),
        "threads": torch.get_num_threads(),
    }


def gemm_speed(M: int, seconds: float = 0.3) -> float:
    """Floating-point operations per second of the head's three products, for the fastest tile size.

    z = H E', D E and D' H for t tokens: 2 t M d operations each. Outputs are written to existing memory.
    """
    best = 0.0
    for t in (64, 128, 256, 512):
        H, E, z = torch.randn(t, D), torch.randn(M, D), torch.empty(t, M)
        at_H, at_E = torch.empty(t, D), torch.empty(M, D)
        times: list[float] = []
        start = time.perf_counter()
        while time.perf_counter() - start < seconds / 4 or len(times) < 2:
            before = time.perf_counter()
            torch.mm(H, E.T, out=z)
            torch.mm(z, E, out=at_H)
            torch.mm(z.T, H, out=at_E)
            times.append(time.perf_counter() - before)
        # The median, not the fastest: the step it is compared with is a median too.
        best = max(best, 6 * t * M * D / statistics.median(times))
    return best


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}

"""What the cost model is asked about: this machine's cores, as measured now, and a GPU, on paper.

For the GPU nothing was measured. Arithmetic and links are the maker's figures, times a share that is assumed; what runs on the
host whatever the device is (noise, hashes of weights, the ledger) costs what it cost where the coefficients were fitted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from dpformer.training.cost import MODES, Coefficients, Layout, Step, coefficients, known, predict
from dpformer.training.speed import gemm_speed


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: float32 operations a second (training is in float32), bytes a second to another GPU in one
    direction, bytes of memory. share: of either that is assumed to be reached. launch: seconds of a micro-batch's kernels.
    """

    name: str
    flops: float
    link: float
    memory: float
    source: str
    share: float = 0.5
    launch: float = 5e-3
    base_memory: float = 2.0e9

    def coefficients(self, measured: Coefficients, ranks: int) -> Coefficients:
        """Those of the model. All GPUs send at once, so a byte costs the same however many there are."""
        flop = 1 / (self.share * self.flops)
        return replace(
            measured,
            head_flop=flop,
            logit=0.0,
            block_flop=flop,
            token=0.0,
            user=0.0,
            micro_batch=self.launch,
            wire_byte=1 / (self.share * self.link) / max(1, ranks - 1),
            # A split table starts as many more kernels for a micro-batch as it takes time here.
            split=self.launch * measured.split / measured.micro_batch,
            busy=0.0,
            memory_base=self.base_memory,
        )


A100 = Gpu("A100 80 GB", 19.5e12, 300e9, 80e9, "NVIDIA's data sheet: 19.5 TFLOP/s float32, NVLink 600 GB/s both ways")


def here(step: Step, ranks: int) -> list[dict[str, Any]]:
    """Costs on this machine, a thread a rank, all ranks on it; a matrix product timed now says how fast it is."""
    cores = os.cpu_count() or 1
    speed = gemm_speed(threads=1) / known()["gemm"]
    c = coefficients().faster(speed)
    layouts = [Layout(ranks, mode, ranks, cores) for mode in (MODES if ranks > 1 else MODES[:1])]
    name = f"this machine, {cores} cores"
    return [_row(name, False, layout, step, c) for layout in layouts]


def on_paper(step: Step, ranks: int, gpu: Gpu = A100) -> list[dict[str, Any]]:
    """Costs on as many GPUs as ranks, of one machine."""
    layouts = [Layout(ranks, mode, ranks, ranks) for mode in (MODES if ranks > 1 else MODES[:1])]
    c = gpu.coefficients(coefficients(), ranks)
    rows = [_row(gpu.name, True, layout, step, c) for layout in layouts]
    return [
        {**row, "fits": row["memory_bytes"] <= gpu.memory, "source": gpu.source, "share": gpu.share} for row in rows
    ]


def _row(device: str, paper: bool, layout: Layout, step: Step, c: Coefficients) -> dict[str, Any]:
    cost = predict(step, layout, c)
    return {"device": device, "on_paper": paper, "ranks": layout.ranks, "mode": layout.mode, **cost.figures()}

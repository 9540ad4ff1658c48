"""How fast this machine multiplies matrices now."""

import time

TILE, ITEMS, DIM = 256, 4096, 64


def gemm_speed(seconds: float = 0.4, threads: int | None = None) -> float:
    """Floating-point operations a second of a float32 matrix product shaped like a tile of the head's, measured now.

    The fastest of many is taken: what else the machine does at the moment is not part of the estimate. threads: of the product;
    as many as torch has by default.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    left, right = torch.randn(TILE, DIM), torch.randn(DIM, ITEMS)
    result = torch.empty(TILE, ITEMS)
    fastest, start = float("inf"), time.perf_counter()
    while (began := time.perf_counter()) - start < seconds:
        torch.mm(left, right, out=result)
        fastest = min(fastest, time.perf_counter() - began)
    torch.set_num_threads(before)
    return 2 * TILE * ITEMS * DIM / fastest

"""Some gloo processes that run a function together, once; what each returns comes back as JSON-ready values and tensors."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpformer.fit.lead_and_follow import follow
from dpformer.privacy import build as build_module
from dpformer.privacy import plan as plan_module
from dpformer.training.ranks import Ranks


def together(size: int, function: Callable[..., Any], *arguments: Any, failing: bool = False) -> list[Any]:
    """`function(rank, size, *arguments)` in `size` processes with one group; their results by rank.

    failing: that some end otherwise is meant; gives exit codes and errors by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Forked from a process that has imported all this and done nothing else: as clean as a new one, without its seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dpformer.fit.run", "polars", "pytest"])
        made = [context.Process(target=_enter, args=(folder, r, size, function, arguments)) for r in range(size)]
        for process in made:
            process.start()
        for process in made:
            process.join()
        if failing:
            errors = [Path(folder, f"{rank}.failed") for rank in range(size)]
            return [(m.exitcode, e.read_text() if e.exists() else "") for m, e in zip(made, errors, strict=True)]
        failures = [path.read_text() for path in sorted(Path(folder).glob("*.failed"))]
        if failures or any(process.exitcode for process in made):
            raise AssertionError("\n".join(failures) or f"exit codes {[process.exitcode for process in made]}")
        # Written by this test itself, a moment ago.
        return [torch.load(f"{folder}/{r}.pt", weights_only=True) for r in range(size)]


def ranks_of(rank: int, size: int) -> Ranks:
    """In a new process: who it is; and the accounting, computed once for each question."""
    for module, name in [
        (plan_module, "epsilon"),
        (build_module, "epsilon"),
        (build_module, "attack_bound"),
    ]:
        setattr(module, name, functools.cache(getattr(module, name)))
    return Ranks(rank, size)


def train(ranks: Ranks, open_run: Any, stop_at: int = 0) -> bool:
    """As the command does: rank 0 opens the run, the others follow."""
    if not ranks.first:
        follower = follow(ranks)
        assert follower is not None
        return follower.train()
    run = open_run()
    try:
        return run.train(should_stop=lambda: 0 < stop_at == run.step, checkpoint_seconds=0.0)
    finally:
        run.close()


def _enter(folder: str, rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    try:
        torch.save(function(rank, size, *arguments), f"{folder}/{rank}.pt")
    except BaseException:
        Path(folder, f"{rank}.failed").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()

"""Run a function in a new process and measure its time and peak memory.

Each measurement needs its own process: an allocator does not return the memory that an earlier one used.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def run_child(target: str, variables: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """Call `package.module:function(**arguments)` in a new interpreter, with these environment variables besides ours.

    Returns what the function returns (a JSON-ready dict) plus `seconds` (the call alone) and `peak_mb` (resident
    memory of the whole process, imports included).
    """
    command = [sys.executable, "-m", "dpformer_experiments.bench.child", target, json.dumps(arguments)]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_ranks(target: str, size: int, threads: int | None = None, **arguments: Any) -> list[dict[str, Any]]:
    """Run `run_child` in `size` parallel processes, connected as under torchrun; returns the results by rank.

    threads: of each process; by default as many as this process has.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(size):
        environment: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
        }
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {} if threads is None else {"OMP_NUM_THREADS": threads}
        command = [sys.executable, "-m", "dpformer_experiments.bench.child", target, json.dumps(arguments)]
        variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{target} failed on a rank of {size}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def resident_mb() -> float:
    """The memory that this process holds now, in MB; 0 on systems without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return 0.0


def forget_peak() -> None:
    """Return free memory to the system and reset the peak counter; does nothing where Linux does not allow it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    """The peak memory of this process since `forget_peak`, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def call(target: str, **arguments: Any) -> dict[str, Any]:
    """Do the work of `run_child` in this process."""
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    start = time.perf_counter()
    result = function(**arguments) or {}
    seconds = time.perf_counter() - start
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {**result, "seconds": seconds, "peak_mb": peak / 2**20}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(call(sys.argv[1], **json.loads(sys.argv[2]))) + "\n")

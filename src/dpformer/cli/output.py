"""Where commands write: results on stdout, everything else on stderr, JSON when a machine asks."""

import json
import os
import sys
from typing import Any

from rich.console import Console

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def say(*texts: str) -> None:
    """Write lines to stderr, without markup and wrapping."""
    for text in texts:
        stderr.print(text, markup=False, soft_wrap=True)


def show(*texts: str) -> None:
    """Write lines to stdout, without markup and wrapping."""
    for text in texts:
        stdout.print(text, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Write one JSON document to stdout, free of colours and wrapping."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def threads() -> int:
    """One thread per core, each with one torch thread: for work on many people at once."""
    import torch

    torch.set_num_threads(1)
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))

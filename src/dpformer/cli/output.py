"""Where commands write: results on stdout, everything else on stderr, JSON when a machine asks."""

import json
import sys
from typing import Any

from rich.console import Console

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """Write one JSON document to stdout, free of colours and wrapping."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def threads() -> int:
    """One thread per core, each with one torch thread: for work on many people at once."""
    import os

    import torch

    torch.set_num_threads(1)
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))

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

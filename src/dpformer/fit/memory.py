"""Running out of memory, told in one line: what is safe, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpformer.errors import DPFormerError


@contextmanager
def enough_memory(folder: Path) -> Iterator[None]:
    """Turn an allocation that failed into an error. A step is charged when its clipped sum is complete, and what was charged is
    made again with the same noise: so nothing is spent that the ledger does not say, and nothing is spent twice.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
        raise DPFormerError(
            f"{folder}: out of memory; nothing is lost, and nothing was spent that the ledger does not say. Close other "
            f"programs and go on with: dpformer resume {folder}; if it comes again, fit in another folder with a smaller "
            "network: --set network.d=16, or --set network.vocabulary=500"
        ) from None


def _is_shortage(error: Exception) -> bool:
    """torch has a class for devices; on the CPU its allocator raises a RuntimeError that says so."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text

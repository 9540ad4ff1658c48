"""What became of another process, as far as torch.distributed's error tells: in words for the process that waited for it."""

from __future__ import annotations

import re


def fate(error: Exception, seconds: float | None = None) -> str:
    """The end of a sentence that begins with who was waited for. seconds: for how long, if that is known."""
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        limit = "" if seconds is None else f" (--timeout {seconds:g} s)"
        return f"has not answered in time{limit}: it hangs, or its machine or network is down; end all processes before you go on"
    return f"has ended: killed, crashed or out of memory, or its network is down ({short(error)})"


def of_all(error: Exception, rank: int, size: int, seconds: float | None = None) -> str:
    """The whole sentence, where `rank` was adding up something with all others."""
    others = ", ".join(str(other) for other in range(size) if other != rank)
    whom = f"rank {others}, which" if size == 2 else f"ranks {others}, one of which"
    return f"rank {rank} was summing with {whom} {fate(error, seconds)}"


def short(error: Exception) -> str:
    """What torch says, in a line and without its own file names."""
    return re.sub(r"^\[[^\]]*\] *", "", " ".join(str(error).split())).split(". ")[0][:200]

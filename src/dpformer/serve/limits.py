"""What a request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one request: bytes of its body, histories, items of a history, k, listed (excluded items, values of a filter), seconds.

    waiting: histories that may wait for the model; beyond that the server says that it is busy.
    """

    body: int = 1_000_000
    histories: int = 64
    history: int = 1000
    k: int = 100
    listed: int = 1000
    timeout: float = 5.0
    waiting: int = 1024

"""What a request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """body in bytes; histories, items of a history, k, excluded items and values of filters a request; seconds a request may take.

    waiting: histories that may wait for the model; beyond that the server says that it is busy.
    """

    body: int = 1_000_000
    histories: int = 64
    history: int = 1000
    k: int = 100
    listed: int = 1000
    timeout: float = 5.0
    waiting: int = 1024

"""uvicorn with our limits and our log, from an open socket to a graceful stop."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.types import ASGIApp

from dpformer.errors import DPFormerError
from dpformer.files import read_small
from dpformer.serve.guard import JsonLines, log
from dpformer.serve.schema import Limits

TOKEN = "DPFORMER_TOKEN"
SHORTEST_TOKEN = 16


def open_socket(host: str, port: int) -> socket.socket:
    """A listening address, before anything is served; port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DPFormerError(
            f"{host}:{port} cannot be listened on ({reason}); choose another with --host and --port"
        ) from None
    return opened


def address_of(opened: socket.socket) -> str:
    """http://host:port"""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reaches_others(opened: socket.socket) -> bool:
    """Whether other machines can reach an address."""
    return not ipaddress.ip_address(opened.getsockname()[0].partition("%")[0]).is_loopback


def read_token(file: Path | None) -> str | None:
    """The token of a file, or of the environment variable DPFORMER_TOKEN; None if there is neither."""
    if file is not None:
        token, where = read_small(file).decode("utf-8", "replace").strip(), str(file)
    elif TOKEN in os.environ:
        token, where = os.environ[TOKEN].strip(), TOKEN
    else:
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise DPFormerError(
            f"{where}: a token is at least {SHORTEST_TOKEN} ASCII characters without blanks; make one with: openssl rand -hex 32"
        )
    return token


def serve_until_stopped(app: ASGIApp, opened: socket.socket, limits: Limits, on_start: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; then take no more requests, answer those that are here, and return."""
    _log_to_stderr()
    # One core is left to the event loop: a forward pass on all cores would delay every request.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(2 * limits.timeout)),
        limit_concurrency=2048,
        lifespan="on",
    )
    server = _Server(config, on_start)
    # uvicorn raises the signal again when it is done; it has then done its work.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[opened])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    log.info("stopped")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in ((log.name, logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

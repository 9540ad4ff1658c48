"""Around every request: its token, a limit on its body, a limit on its time, one log line, and headers for the page.

No log line holds anything that a client sent: the path is that of a route, the query is left out, and of an error only its type
and the places in the code are written, since its message could quote a history.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpformer.serve.schema import Limits

log = logging.getLogger("dpformer.serve")

_HEADERS = [
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
     b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]  # fmt: skip


# Without a token: the page, which asks for it, the description of the API, and what an orchestrator polls.
_OPEN = {"/", "/style.css", "/app.js", "/docs", "/docs.js", "/openapi.json", "/healthz", "/readyz"}
_NO_TOKEN = JSONResponse(
    {"detail": "this server wants a token: send the header 'authorization: Bearer TOKEN'"},
    401,
    {"www-authenticate": "Bearer"},
)


class JsonLines(logging.Formatter):
    """One JSON object a line; fields come as `extra={"fields": {...}}`. Arguments and tracebacks of others are left out."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        event = record.msg if record.name == log.name else record.getMessage()
        line = {"time": when, "level": record.levelname.lower(), "event": event}
        if record.exc_info and record.exc_info[1] is not None:
            line |= described(record.exc_info[1])
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False)


def described(error: BaseException) -> dict[str, Any]:
    """The type of an error and where it was raised, without its message."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    return {"error": type(error).__name__, "at": [f"{f.filename}:{f.lineno} {f.name}" for f in frames]}


class Guard:
    """The middleware."""

    def __init__(
        self, app: ASGIApp, limits: Limits, answered: Callable[[str, str, int, float], None], token: str | None = None
    ) -> None:
        self.app, self.limits, self.answered = app, limits, answered
        self._expected = None if token is None else f"Bearer {token}".encode()

    def _refused(self, scope: Scope) -> bool:
        """Whether a request needs the token and does not carry it; the comparison takes the same time for every guess."""
        if self._expected is None or scope["path"] in _OPEN:
            return False
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return not hmac.compare_digest(given, self._expected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, whole, and see to its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, request_id, status = time.perf_counter(), secrets.token_hex(6), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message.get("headers", [])}
                extra = [(name, value) for name, value in _HEADERS if name not in given]
                message["headers"] = [*message.get("headers", []), *extra, (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            body = _NO_TOKEN if self._refused(scope) else await self._body(receive)
            if isinstance(body, JSONResponse):
                await body(scope, receive, watched)
            else:
                await self.app(scope, _replayed(body, receive), watched)
        except _Gone:
            status = 499  # the client is gone; the number is nginx's
        except Exception as error:  # noqa: BLE001  nothing may reach a log that quotes what it was about
            log.error("failed", extra={"fields": {"id": request_id, **described(error)}})
            if not status:
                await JSONResponse({"detail": "an error of the server; its log has more"}, 500)(scope, receive, watched)
        seconds = time.perf_counter() - began
        path = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if path != "other" else "other"
        self.answered(method, path, status, seconds)
        fields = {"id": request_id, "method": method, "path": path, "status": status, "ms": round(seconds * 1000, 2)}
        fields |= {"histories": scope["histories"]} if "histories" in scope else {}
        log.info("request", extra={"fields": fields})

    async def _body(self, receive: Receive) -> bytes | JSONResponse:
        """The body, or why it is not taken: too large, or too slow."""
        body = bytearray()

        async def read() -> bool:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                body.extend(message.get("body", b""))
                if len(body) > self.limits.body:
                    return False
                if not message.get("more_body"):
                    return True

        try:
            whole = await asyncio.wait_for(read(), self.limits.timeout)
        except TimeoutError:
            text = f"the body did not arrive within {self.limits.timeout:g} seconds"
            return JSONResponse({"detail": text}, 408, {"connection": "close"})
        if not whole:
            text = f"the body is longer than {self.limits.body:,} bytes: ask in several requests"
            return JSONResponse({"detail": text}, 413, {"connection": "close"})
        return bytes(body)


class _Gone(Exception):  # noqa: N818
    """The client went away."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, once more; after that, what the client does."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again

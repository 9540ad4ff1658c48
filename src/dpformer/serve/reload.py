"""Exchange the served model without dropping a request.

Each model has an application of its own. A request is answered by the application that was current when it came; an old
application ends when its last request is answered.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from dpformer.artifact.layout import MODEL
from dpformer.errors import DPFormerError
from dpformer.serve.guard import log

POLL_SECONDS = 2.0


class _Serving:
    """An application with its lifespan, and the requests that it is answering."""

    def __init__(self, app: FastAPI) -> None:
        self.app, self._active, self._idle = app, 0, asyncio.Event()
        self._lifespan = AsyncExitStack()
        self._idle.set()

    async def start(self) -> None:
        await self._lifespan.enter_async_context(self.app.router.lifespan_context(self.app))

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._active += 1
        self._idle.clear()
        try:
            await self.app(scope, receive, send)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def stop(self) -> None:
        await self._idle.wait()
        await self._lifespan.aclose()


class Reloading:
    """An ASGI application over a run folder. `reload` loads the folder again; SIGHUP does, and `watch` when the model changes.

    make: from the folder to an application; it may refuse with a `DPFormerError`, and the old model stays.
    """

    def __init__(self, run: Path, make: Callable[[Path], FastAPI], watch: bool = False) -> None:
        self._run, self._make, self._watch = run, make, watch
        self._version = _version(run)
        self._current = _Serving(make(run))
        self._ending: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or begin and end with the server."""
        if scope["type"] != "lifespan":
            await self._current.answer(scope, receive, send)
            return
        await receive()
        await self._current.start()
        watching = asyncio.create_task(self._watch_folder()) if self._watch else None
        if hasattr(signal, "SIGHUP"):
            with suppress(ValueError, RuntimeError):  # not the main thread, as in tests
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_soon)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if watching is not None:
            watching.cancel()
        await self._current.stop()
        await asyncio.gather(*self._ending)
        await send({"type": "lifespan.shutdown.complete"})

    async def reload(self) -> bool:
        """Load the folder and serve it from now on. False, with a line in the log, if it is refused."""
        async with self._lock:
            version = _version(self._run)
            try:
                serving = _Serving(await asyncio.to_thread(self._make, self._run))
            except DPFormerError as error:
                log.error("reload refused", extra={"fields": {"run": str(self._run), "reason": str(error)}})
                return False
            await serving.start()
            self._version, old, self._current = version, self._current, serving
            self._keep(asyncio.create_task(old.stop()))
            log.info("reloaded", extra={"fields": {"run": str(self._run)}})
            return True

    def _reload_soon(self) -> None:
        async def reload() -> None:
            await self.reload()

        self._keep(asyncio.create_task(reload()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it is done: the loop itself does not."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _watch_folder(self) -> None:
        refused = self._version
        while True:
            await asyncio.sleep(POLL_SECONDS)
            version = _version(self._run)
            # A model that was refused is tried again when it changes, not every time.
            if version is not None and version not in (self._version, refused) and not await self.reload():
                refused = version


def _version(run: Path) -> tuple[str, int, int, int] | None:
    """What changes when the folder, the link to it, or the model in it is replaced; None while there is no model."""
    try:
        status = (run / MODEL).stat()
        return str(run.resolve()), status.st_ino, status.st_mtime_ns, status.st_size
    except OSError:
        return None

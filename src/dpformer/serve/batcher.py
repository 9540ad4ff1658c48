"""Joins what is asked within a few milliseconds into one call, made by one thread beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class BusyError(Exception):
    """Too much is waiting already."""


class Batcher(Generic[Q, A]):
    """`ask` from any number of tasks; `work` gets at most `size` queries at a time.

    The first query of a batch waits `wait` seconds for others; those that come while a batch is at work are in the next one.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Q]], Sequence[A]],
        *,
        size: int = 64,
        wait: float = 0.002,
        waiting: int = 1024,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._work, self._size, self._wait, self._most, self._on_batch = work, size, wait, waiting, on_batch
        self._queue: asyncio.Queue[tuple[Q, asyncio.Future[A]] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Queries that no thread has taken up yet."""
        return self._queue.qsize()

    def start(self) -> None:
        """Begin to take queries, within the running event loop; after a stop it can be started again, in another."""
        self._queue = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._queue.put_nowait(None)
            await self._task
            self._thread.shutdown()

    async def ask(self, queries: Sequence[Q]) -> list[A]:
        """Answers in the order of the queries; `BusyError` where too many wait."""
        if self.waiting + len(queries) > self._most:
            raise BusyError
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in queries]
        for query, future in zip(queries, futures, strict=True):
            self._queue.put_nowait((query, future))
        return await asyncio.gather(*futures)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        over = False
        while not over:
            entries = [await self._queue.get()]
            if self._queue.qsize() < self._size - 1 and entries[0] is not None:
                await asyncio.sleep(self._wait)
            while len(entries) < self._size and not self._queue.empty():
                entries.append(self._queue.get_nowait())
            over = None in entries
            # Skip queries whose client gave up waiting.
            batch = [entry for entry in entries if entry is not None and not entry[1].done()]
            if not batch:
                continue
            self._on_batch(len(batch))
            try:
                answers = await loop.run_in_executor(self._thread, self._work, [query for query, _ in batch])
            except Exception as error:  # noqa: BLE001  it belongs to those who asked; the others go on
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

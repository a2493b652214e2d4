"""Deltas from the engine's thread to the consumers' event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from omni_runtime.ar.messages import Delta


class Mailbox:
    """One request's deltas on their way to its consumer; what waits is merged into one. Made in the consumer's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: Delta | None = None
        self._error: Exception | None = None

    def put(self, delta: Delta) -> None:
        """From any thread; :func:`wake` afterwards."""
        with self._lock:
            if self._waiting is None:
                self._waiting = delta
            else:
                self._waiting.merge(delta)

    def fail(self, error: Exception) -> None:
        """From any thread; the consumer gets what waits, then ``error``. :func:`wake` afterwards."""
        with self._lock:
            self._error = self._error or error

    async def get(self) -> Delta:
        """Everything that has arrived since the last call, as one delta; waits for at least one."""
        while True:
            with self._lock:
                delta, self._waiting = self._waiting, None
                error = self._error
                self._arrived.clear()
            if delta is not None:
                return delta
            if error is not None:
                raise error
            await self._arrived.wait()

    @staticmethod
    def wake(mailboxes: Iterable[Mailbox]) -> None:
        """Tell the consumers, with one call into each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mailboxes:
            by_loop.setdefault(mailbox._loop, []).append(mailbox)
        for loop, group in by_loop.items():
            try:
                loop.call_soon_threadsafe(_set_all, group)
            except RuntimeError:  # the loop is closed: nobody is left to read
                continue


def _set_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox._arrived.set()

"""Places to run in, given to those who wait: the high ones first, each kind in the order of its coming."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """A semaphore of ``count`` places with two queues; used in one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {True: deque(), False: deque()}

    async def acquire(self, *, high: bool = False) -> None:
        """Return with a place; one who is cancelled while waiting holds none."""
        if self._free and not any(self._waiting.values()):
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[high].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            elif turn in self._waiting[high]:
                self._waiting[high].remove(turn)
            raise

    def release(self) -> None:
        """Give the place to whoever is next."""
        for queue in (self._waiting[True], self._waiting[False]):
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1

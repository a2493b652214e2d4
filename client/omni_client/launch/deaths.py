"""How often a process died of late: one that cannot live is not started for ever."""

from __future__ import annotations

import time
from collections import deque

LIMIT, WITHIN_SECONDS = 5, 60.0


class Deaths:
    """Counts deaths within a sliding window."""

    def __init__(self, limit: int = LIMIT, seconds: float = WITHIN_SECONDS) -> None:
        self._times: deque[float] = deque(maxlen=limit)
        self._limit, self._seconds = limit, seconds

    def add(self, now: float | None = None) -> bool:
        """Count one at `now` (monotonic seconds); whether that makes too many."""
        self._times.append(time.monotonic() if now is None else now)
        return len(self._times) == self._limit and self._times[-1] - self._times[0] <= self._seconds

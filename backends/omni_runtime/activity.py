"""Speech probabilities into windows for a recogniser: cut in silence, at most as long as it takes.

A region of speech begins where the probability reaches ``threshold`` and ends where it has stayed below ``release`` for
``silence`` seconds. Regions that lie close together share a window, since a recogniser reads better with context; one
that is too long is cut where speech is least likely.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class WindowRules:
    """All in seconds but the probabilities; ``window`` is what the recogniser takes at once."""

    threshold: float = 0.5
    release: float = 0.35
    silence: float = 0.5
    pad: float = 0.4
    gap: float = 2.0
    window: float = 28.0
    shortest: float = 0.1


class WindowFinder:
    """Takes probabilities as they come and gives windows, as frames [start, end), as soon as they are certain.

    Args:
        frame: seconds that one probability stands for.
    """

    def __init__(self, frame: float, rules: WindowRules | None = None) -> None:
        rules = rules or WindowRules()
        self._rules = rules
        self._pad = round(rules.pad / frame)
        self._silence = round(rules.silence / frame)
        self._gap = round(rules.gap / frame)
        self._longest = int(rules.window / frame)
        self._shortest = rules.shortest / frame
        self._history: list[float] = []
        self._begin: int | None = None
        self._quiet: int | None = None
        self._window: tuple[int, int] | None = None
        self._floor = 0

    def push(self, probabilities: Iterable[float]) -> list[tuple[int, int]]:
        """The windows that ``probabilities`` complete."""
        windows: list[tuple[int, int]] = []
        for probability in probabilities:
            now = len(self._history)
            self._history.append(probability)
            if self._begin is None:
                if probability >= self._rules.threshold:
                    self._begin, self._quiet = now, None
                elif self._window and now - self._window[1] > self._gap:
                    windows += self._flush()
                continue
            if probability >= self._rules.threshold:
                self._quiet = None
            elif probability < self._rules.release and self._quiet is None:
                self._quiet = now
            if self._quiet is not None and now - self._quiet >= self._silence:
                windows += self._region(self._begin, self._quiet)
                self._begin = self._quiet = None
            elif now - self._start(self._begin) >= self._longest - self._pad:
                cut = self._cut(self._begin, now)
                windows += self._region(self._begin, cut, pad=0)
                windows += self._flush()
                self._begin, self._floor = cut, cut
        return windows

    def close(self) -> list[tuple[int, int]]:
        """What is still open."""
        windows: list[tuple[int, int]] = []
        if self._begin is not None:
            windows += self._region(self._begin, self._quiet or len(self._history))
            self._begin = None
        return windows + self._flush()

    def _start(self, begin: int) -> int:
        return max(self._floor, begin - self._pad)

    def _region(self, begin: int, end: int, pad: int | None = None) -> list[tuple[int, int]]:
        if end - begin < self._shortest:
            return []
        start, stop = self._start(begin), min(len(self._history), end + (self._pad if pad is None else pad))
        windows: list[tuple[int, int]] = []
        if self._window:
            if stop - self._window[0] <= self._longest and start - self._window[1] <= self._gap:
                self._window = (self._window[0], stop)
                return windows
            windows = self._flush()
            start = max(start, self._floor)
        self._window = (start, stop)
        return windows

    def _flush(self) -> list[tuple[int, int]]:
        if self._window is None:
            return []
        window, self._window = self._window, None
        self._floor = window[1]
        return [window]

    def _cut(self, begin: int, now: int) -> int:
        """The quietest frame of the last third of what is too long."""
        first = max(begin + 1, now - self._longest // 3)
        return min(range(first, now + 1), key=lambda frame: self._history[frame])

"""What a person sees while the stack starts: bars on a terminal, lines elsewhere. Nothing goes to stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Step(Protocol):
    """Tells that one more of a task's items is done, or (None) which one is under way."""

    def __call__(self, done: str | None = None, *, doing: str | None = None) -> None: ...


class Display:
    """`quiet` shows nothing but errors."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True, quiet=quiet)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[Step]:
        """A task of `total` items."""
        if self.console.is_terminal and not self.console.quiet:
            columns = (TextColumn("{task.description:<10}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, TextColumn("{task.fields[now]}"), console=self.console) as progress:
                bar = progress.add_task(title, total=total, now="")

                def step(done: str | None = None, *, doing: str | None = None) -> None:
                    progress.update(bar, advance=0 if done is None else 1, now=doing or done or "")

                yield step
            return
        began = time.monotonic()
        count = 0

        def line(done: str | None = None, *, doing: str | None = None) -> None:
            nonlocal count
            if done is not None:
                count += 1
                self.say(f"{title} {count}/{total} {done}, at {time.monotonic() - began:.1f} s")

        yield line

"""What a person sees while something is fetched or made: bars on a terminal, lines elsewhere, all on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class Report(Protocol):
    """Where progress goes."""

    @property
    def console(self) -> Console: ...

    def say(self, line: str) -> None: ...


class Terminal:
    """Progress on stderr; `quiet` shows nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(file=sys.stderr, highlight=False, soft_wrap=True, quiet=quiet)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)


def megabytes(count: float) -> str:
    """`1.3 GB`, `98.4 MB`, as download pages count them (powers of 1000)."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def transfer(report: Report, name: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A transfer of `total` bytes, `done` of which are here already; call what it yields with each new count."""
    if not report.console.is_terminal or report.console.quiet:
        began = f", {megabytes(done)} of it is here" if done else ""
        report.say(f"fetching {name} ({megabytes(total)}{began})")
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=report.console) as progress:
        bar = progress.add_task(name, total=total, completed=done)
        yield lambda count: progress.update(bar, completed=count)

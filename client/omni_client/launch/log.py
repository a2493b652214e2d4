"""The end of a log file, for an error message."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_LOOK = 16_384


def tail(path: Path, count: int = 12, start: int = 0) -> str:
    """The last `count` lines after byte `start`, each of at most 400 characters; "" where there is no such file."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - _LOOK))
        return "\n".join(line.decode(errors="replace").rstrip()[:400] for line in file.read().splitlines()[-count:])
    return ""

"""Bringing a dead model back: unload, then load, by one process at a time, with growing pauses."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from omni_runtime.errors import OmniError
from omni_runtime.kserve import Connection

SUPERVISED = "OMNI_SUPERVISED"
FIRST_PAUSE, LONGEST_PAUSE, SERVICE_SECONDS = 1.0, 30.0, 30.0
UNLOAD_SECONDS = 3.0
_LOCK_POLL = 0.1


def supervised() -> bool:
    """Whether a launcher watches this server's models and reloads them, so that scripts need not."""
    return os.environ.get(SUPERVISED) == "1"


class Backoff:
    """Pauses of 1, 2, 4 … 30 s between attempts; 30 s of service make it begin anew."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._served_since: float | None = None

    def next(self) -> float:
        """Seconds to wait before the next attempt; the first is made at once."""
        if self._served_since is not None and time.monotonic() - self._served_since >= SERVICE_SECONDS:
            self._pause = 0.0
        self._served_since = None
        pause = self._pause
        self._pause = min(LONGEST_PAUSE, pause * 2 or FIRST_PAUSE)
        return pause

    def serves(self) -> None:
        """It works again."""
        self._served_since = time.monotonic()


@asynccontextmanager
async def reload_lock(server: str, model: str, seconds: float = 120.0) -> AsyncIterator[bool]:
    """The right to reload ``model`` on ``server``; yields False if another had it meanwhile, and so has reloaded it.

    Raises:
        TimeoutError: another held it for longer than ``seconds``.
    """
    folder = Path(tempfile.gettempdir()) / f"triton-omni-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{server.replace(':', '-').replace('/', '-')}-{model}.lock"
    with path.open("a") as file:
        waited = False
        async with asyncio.timeout(seconds):
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                waited = True
                await asyncio.sleep(_LOCK_POLL)
        try:
            yield not waited
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


async def reload(connection: Connection, model: str, seconds: float = 120.0) -> None:
    """Unload and load ``model`` unless another does it just now; returns when that is done.

    Loading alone does nothing for a model whose stub died, since Triton believes it to be loaded.

    Raises:
        OmniError: it did not load.
        TimeoutError: another's attempt took longer than ``seconds``.
    """
    async with reload_lock(connection.url, model, seconds) as ours:
        if not ours:
            return
        with suppress(OmniError):
            await connection.unload(model, seconds)
        # A request that was cancelled in a dead stub never ends, and with it the unloading; loading works all the same.
        with suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_SECONDS):
                await _unloaded(connection, model)
        await connection.load(model, seconds)


async def _unloaded(connection: Connection, model: str) -> None:
    while True:
        states = [row.get("state") for row in await connection.index() if row["name"] == model]
        if not {"READY", "UNLOADING"} & set(states):
            return
        await asyncio.sleep(0.05)

"""The OpenAI frontend as a child of the launcher: `python -m omni_client.launch.edge`.

It reads its settings as JSON from stdin, so that no key shows in a process list, and tells its address on an inherited
pipe. A process of its own: a busy edge does not hold up the watch over the server, nor the other way round.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from signal import SIGTERM
from typing import Any

from omni_runtime.errors import Internal

from omni_client.launch import processes
from omni_client.launch.log import tail

START_SECONDS = 60.0


class Frontend:
    """Start it with :meth:`start`, again when it died; :attr:`process` is the last one started.

    Args:
        settings: the fields of `omni_client.frontend.Settings`; a port of 0 is picked once, and kept.
        log: what it says is appended to it.
        env: added to its environment.
    """

    def __init__(self, settings: Mapping[str, Any], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.settings = dict(settings)
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.sessions: set[int] = set()
        self._env = {**os.environ, **(env or {})}

    async def start(self) -> str:
        """`http://HOST:PORT` once it accepts connections.

        Raises:
            Internal: it ended, or was not ready in time; the message ends with its last log lines.
        """
        self.process, reader = self._spawn()
        self.sessions.add(self.process.pid)
        where = await _address(reader, START_SECONDS)
        if where is None:
            raise Internal(f"the frontend did not start; its last lines ({self.log}):\n{tail(self.log)}")
        self.settings["port"] = int(where.rpartition(":")[2])
        # An address to call, not the one that stands for all.
        return where.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")

    async def stop(self, seconds: float) -> None:
        """End it: SIGTERM, then after `seconds` SIGKILL, for its workers too."""
        if self.process is None:
            return
        if self.process.poll() is None and seconds > 0:
            self.process.send_signal(SIGTERM)
            await processes.ended(self.process, seconds)
        if self.process.poll() is None:
            self.process.kill()
        await processes.ended(self.process)
        await asyncio.to_thread(processes.end_all, {self.process.pid})

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        try:
            with tempfile.TemporaryFile() as stdin, self.log.open("ab") as output:
                stdin.write(json.dumps({"settings": self.settings, "writer": writer}).encode())
                stdin.seek(0)
                command = [sys.executable, "-m", "omni_client.launch.edge"]
                process = processes.spawn(command, env=self._env, output=output, stdin=stdin, pass_fds=[writer])
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return process, reader


async def _address(reader: int, seconds: float) -> str | None:
    """What the frontend wrote to the pipe; None when it ended first, or `seconds` passed. It closes `reader`."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    os.set_blocking(reader, False)
    loop.add_reader(reader, readable.set)
    try:
        async with asyncio.timeout(seconds):
            await readable.wait()
        return os.read(reader, 4096).decode().strip() or None
    except TimeoutError:
        return None
    finally:
        loop.remove_reader(reader)
        os.close(reader)


def main() -> None:
    from omni_client.frontend.server import serve
    from omni_client.frontend.settings import Settings

    document = json.load(sys.stdin)
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document["settings"].items()
    }

    def ready(where: str) -> None:
        os.write(document["writer"], f"{where}\n".encode())
        os.close(document["writer"])

    asyncio.run(serve(Settings(**settings), ready=ready))


if __name__ == "__main__":
    main()

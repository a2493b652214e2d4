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
from typing import Any

from omni_client.launch import processes


def start(settings: Mapping[str, Any], log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start the frontend; `settings` are the fields of `omni_client.frontend.Settings`.

    Returns the process and the end of a pipe from which :func:`address` reads.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryFile() as stdin, log.open("ab") as output:
            stdin.write(json.dumps({"settings": dict(settings), "writer": writer}).encode())
            stdin.seek(0)
            command = [sys.executable, "-m", "omni_client.launch.edge"]
            process = processes.spawn(command, env=os.environ, output=output, stdin=stdin, pass_fds=[writer])
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return process, reader


async def address(reader: int, seconds: float) -> str | None:
    """`http://HOST:PORT` once the frontend accepts connections; None when it ended first, or `seconds` passed.

    It closes `reader`.
    """
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

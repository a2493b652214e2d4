"""The OpenAI frontend as a child of the launcher: `python -m omni_client.launch.edge`.

It reads its settings as JSON from stdin, so that no key shows in a process list, and inherits a socket that listens
already, so that its port is known and held from the first moment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_client.launch import processes


def start(
    settings: Mapping[str, Any], listener: socket.socket, log: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the frontend on `listener`; `settings` are the fields of `omni_client.frontend.Settings`."""
    document = json.dumps({"settings": dict(settings), "descriptor": listener.fileno()})
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as stdin, log.open("ab") as output:
        stdin.write(document.encode())
        stdin.seek(0)
        return processes.spawn(
            [sys.executable, "-m", "omni_client.launch.edge"],
            env={**os.environ, **env},
            output=output,
            stdin=stdin,
            pass_fds=[listener.fileno()],
        )


def main() -> None:
    from omni_client.frontend import Settings, serve

    document = json.load(sys.stdin)
    settings = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document["settings"].items()
    }
    serve(Settings(**settings), sockets=[socket.socket(fileno=document["descriptor"])])


if __name__ == "__main__":
    main()

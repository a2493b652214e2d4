"""The processes behind a model: which they are, and when they end.

A dead stub is invisible to Triton: readiness and index say nothing, and the request in flight is never answered. The
kernel knows at once, through a pidfd. Triton starts one stub for each instance of a Python model, and names the
server's pid and the instance in its command line.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

STUB = "triton_python_backend_stub"
DEFAULT_PORT = 8001


def stub_pids(server: int, model: str) -> list[int]:
    """The stubs of ``model``'s instances below the tritonserver with pid ``server``."""
    instance = re.compile(rf"{re.escape(model)}_\d+_\d+")
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        words = _words(entry)
        if words and words[0].endswith(STUB) and str(server) in words and any(map(instance.fullmatch, words)):
            found.append(int(entry.name))
    return sorted(found)


def server_of(stub: int) -> int | None:
    """The tritonserver that started ``stub``; None where no such stub is to be seen (another host, say)."""
    words = _words(Path(f"/proc/{stub}"))
    if not words or not words[0].endswith(STUB):
        return None
    status = Path(f"/proc/{stub}/stat").read_text().rpartition(")")[2].split()
    return int(status[1])


def _words(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


class Watch:
    """Calls ``ended`` once, in the running loop, as soon as one of ``pids`` is gone."""

    def __init__(self, pids: Iterable[int], ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._files: list[int] = []
        self.pids = tuple(pids)
        for pid in self.pids:
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(self._fire)
                continue
            self._files.append(file)
            self._loop.add_reader(file, self._fire)

    def _fire(self) -> None:
        if self._files or self._ended is not _nothing:
            ended, self._ended = self._ended, _nothing
            self.close()
            ended()

    def close(self) -> None:
        """Watch no longer."""
        self._ended = _nothing
        for file in self._files:
            self._loop.remove_reader(file)
            os.close(file)
        self._files.clear()


def _nothing() -> None: ...


def own_server() -> int | None:
    """The tritonserver that this process is a stub of; None in any other process."""
    return os.getppid() if server_of(os.getpid()) else None


def serves_at(server: int, address: str) -> bool:
    """Whether the tritonserver with pid ``server`` is the one that a stub of it reaches at ``address``."""
    return own_server() == server and address == own_address().removeprefix("grpc://")


def kill(pids: Iterable[int]) -> None:
    """End stubs that hang; those that are gone are gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def own_address() -> str:
    """The gRPC address of the server that this process is a stub of: OMNI_GRPC, else its ``--grpc-port``, else 8001."""
    if address := os.environ.get("OMNI_GRPC"):
        return address
    words = _words(Path(f"/proc/{os.getppid()}"))
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, separator, value = word.partition("=")
        if name == "--grpc-port" and (port := value if separator else following).isdigit():
            return f"127.0.0.1:{port}"
    return f"127.0.0.1:{DEFAULT_PORT}"

"""Ports to listen on: those asked for, checked before anything starts, and free ones for 0."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from omni_runtime.errors import InvalidRequest


def listen(host: str, port: int, name: str) -> socket.socket:
    """A socket that listens on `host`:`port` (0: any free one).

    Raises:
        InvalidRequest: it cannot be had; the message names the flag, `--<name>-port`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {host!r}: {error}", param=f"{name}-port") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise InvalidRequest(
            f"port {port} of {host} cannot be had ({error}): choose another with --{name}-port, 0 picks a free one",
            param=f"{name}-port",
        ) from None
    return listener


def pick(host: str, wanted: dict[str, int]) -> dict[str, int]:
    """The number of each port in `wanted`, with a free one in place of 0; all different.

    They are free when this returns, and may be taken before the server binds them: then pick again.

    Raises:
        InvalidRequest: one that was asked for is taken, or asked for twice.
    """
    held: dict[str, socket.socket] = {}
    try:
        for name, port in sorted(wanted.items(), key=lambda item: item[1] == 0):  # those with a number come first
            held[name] = listen(host, port, name)
        return {name: held[name].getsockname()[1] for name in wanted}
    finally:
        for listener in held.values():
            listener.close()


def held_by(pid: int) -> set[int]:
    """The TCP ports on which process `pid` listens."""
    sockets: set[str] = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = str(entry.readlink()).partition(":")  # "socket:[12345]"
                if kind == "socket":
                    sockets.add(inode.strip("[]"))
    held: set[int] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:  # 0A: LISTEN
                    held.add(int(fields[1].rpartition(":")[2], 16))
    return held

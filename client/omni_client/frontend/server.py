"""Runs the frontend with uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from omni_runtime.reload import SUPERVISED

from omni_client.frontend.app import create_app
from omni_client.frontend.context import configure_logs
from omni_client.frontend.settings import Settings

# Connections that wait to be accepted: a burst beyond the limit must get its 429, not a refused connection.
_BACKLOG = 4096
# Seconds after which the system ends a connection whose client reads nothing; the route has given up before.
_LATER = 10.0


class _Server(uvicorn.Server):
    """Tells when it listens, and leaves signals to `serve`."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    settings: Settings, ready: Callable[[str], None] | None = None, *, stop: asyncio.Event | None = None
) -> None:
    """Serves until SIGTERM or SIGINT (a second one does not wait), or, when `stop` is given, until that is set.

    `ready` is called with the address, `http://HOST:PORT`, once connections are accepted. After the end is asked for,
    no new connection is accepted and requests in flight have `settings.grace` seconds. OSError when the port is taken.
    """
    configure_logs(settings.log_format)
    _allow_files()
    with _listen(settings.host, settings.port, settings.write_timeout + _LATER) as listener:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            create_app(settings), log_config=None, access_log=False, server_header=False, ws="none", lifespan="on",
            timeout_keep_alive=75, timeout_graceful_shutdown=max(1, round(settings.grace)),
        )  # fmt: skip
        server = _Server(config, lambda: ready(address) if ready else None)
        with _only_asking(), _signals(server) if stop is None else contextlib.nullcontext(stop) as asked:
            waiter = asyncio.create_task(_end(server, asked))
            try:
                await server.serve([listener])
            finally:
                waiter.cancel()
                await asyncio.gather(waiter, return_exceptions=True)
    if not server.started:
        raise RuntimeError("the frontend did not start; its log tells why")


async def _end(server: uvicorn.Server, asked: asyncio.Event) -> None:
    await asked.wait()
    server.should_exit = True


@contextlib.contextmanager
def _only_asking() -> Iterator[None]:
    """What dies is reloaded on the server's side; here the pools only ask, often, whether it is back."""
    before = os.environ.get(SUPERVISED)
    os.environ[SUPERVISED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SUPERVISED]
        else:
            os.environ[SUPERVISED] = before


@contextlib.contextmanager
def _signals(server: uvicorn.Server) -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    asked = asyncio.Event()

    def ask() -> None:
        server.force_exit = asked.is_set()
        asked.set()

    loop = asyncio.get_running_loop()
    kinds = (signal.SIGTERM, signal.SIGINT)
    for kind in kinds:
        loop.add_signal_handler(kind, ask)
    try:
        yield asked
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)


def _listen(host: str, port: int, unread: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off: else a small chunk waits 40 ms for the one before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit it: a client that neither reads nor leaves does not keep its connection.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * unread))
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _allow_files() -> None:
    """As many open files as the system lets us: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

"""Everything that one `triton-omni serve` runs: the server, its models, the frontend; started, watched and drained."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from types import TracebackType
from typing import Any, Self

from omni_runtime.errors import OmniError
from omni_runtime.reload import Backoff

from omni_client.launch import counters, ports, processes, shm
from omni_client.launch.counters import Counters
from omni_client.launch.deaths import Deaths
from omni_client.launch.edge import Frontend
from omni_client.launch.guard import Guards, Probing
from omni_client.launch.log import tail
from omni_client.launch.models import Models, levels_of
from omni_client.launch.progress import Display
from omni_client.launch.races import first_of
from omni_client.launch.triton import ServerOptions, TritonServer

__all__ = ["Stack", "StackOptions", "levels_of"]

REAP_SECONDS = 1.0
END_SECONDS = 5.0
# A server that is stopped, or has answered nothing for a minute, is ended and started again.
SILENT_STOPPED, SILENT = 2, 6


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What is served, and where."""

    server: ServerOptions
    levels: tuple[tuple[str, ...], ...]
    """The models to load; each calls only models of the levels before its own (:func:`levels_of` makes them)."""
    host: str = "127.0.0.1"
    openai_port: int = 9000
    frontend: Mapping[str, Any] | None = field(default_factory=dict)
    """Further fields of the frontend's settings; None runs no frontend."""
    warm: bool = True
    alone: bool = False
    """This process runs nothing besides: at the end every descendant is ended, also one that left its session."""
    probing: Probing = field(default_factory=Probing)
    counts: Path | None = None
    """A file for the counters of supervision, which the frontend shows."""


class Stack:
    """`async with Stack(...) as stack: await stack.start()`; leaving the block leaves nothing behind.

    Attributes:
        addresses: name to address of what listens, filled by :meth:`start`.
    """

    def __init__(self, options: StackOptions, display: Display | None = None) -> None:
        self.options = options
        self.display = display or Display(quiet=True)
        self.server = TritonServer(options.server)
        self.addresses: dict[str, str] = {}
        self.counters = Counters(options.counts)
        self._frontend: Frontend | None = None
        self._models: Models | None = None

    async def __aenter__(self) -> Self:
        processes.become_subreaper()
        shm.sweep()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Return when every pipeline is loaded and warm and the frontend answers.

        Raises:
            InvalidRequest: a port that was asked for is taken.
            OmniError: a model did not load or a pipeline did not answer.
        """
        # The frontend's port is held from the start: a taken one shows before a minute of loading.
        with contextlib.ExitStack() as held:
            if self.options.frontend is not None:
                held.enter_context(ports.listen(self.options.host, self.options.openai_port, "openai"))
            self.display.say(f"starting {self.options.server.binary}, log in {self.server.log}")
            await self.server.start()
            self._models = Models(self.options.levels, self.server, self.display)
            self.addresses = {
                "http": f"http://{self.server.address('http')}",
                "grpc": self.server.address("grpc"),
                "metrics": f"http://{self.server.address('metrics')}/metrics",
            }
            await self._models.load()
            if self.options.warm:
                await self._models.warm()
        if self.options.frontend is not None:
            self._frontend = self._make_frontend(self.options.frontend)
            self.addresses["openai"] = f"{await self._frontend.start()}/v1"

    async def supervise(self, restarted: Callable[[], None] | None = None) -> str:
        """Keep it all at work: models that die or hang are loaded again, the server and the frontend started again.

        `restarted` is called when the server is back. Returns only when one of the two cannot be kept alive, with the
        reason. Cancelled, it leaves everything as it is: a drain begins with that.
        """
        keepers = [self._keep_server(restarted or _nothing), self._reap()]
        if self._frontend is not None:
            keepers.append(self._keep_frontend(self._frontend))
        return str(await first_of(*keepers))

    async def drain(self) -> None:
        """Refuse at the edge, finish what runs, unload pipelines, then stages, end the server; within the time set."""
        seconds = self.options.server.drain_seconds
        limit = asyncio.get_running_loop().time() + seconds

        def left() -> float:
            return max(0.1, limit - asyncio.get_running_loop().time())

        with self.display.task("draining", len(self.options.levels) + 1 + (self._frontend is not None)) as step:
            if self._frontend is not None:
                await self._frontend.stop(left())
                step("frontend")
            empty = self._models is not None and await self._models.unload(left, step)
            await self._disconnect()
            # With its models gone it ends within a second, but for a request that was under way in a stub that died:
            # it waits for that until its time is up, and need not.
            await self.server.stop(END_SECONDS if empty else max(END_SECONDS, left()))
            step("server")

    async def close(self) -> None:
        """End at once whatever still runs; no process and no shared memory of this stack remains."""
        await self._disconnect()
        if self._frontend is not None:
            await self._frontend.stop(0)
        await self.server.stop(0)
        processes.end_all(None if self.options.alone else self._sessions())
        self.server.release()

    def _sessions(self) -> set[int]:
        # Each child leads a session of its own, which what it starts belongs to, also once it is orphaned.
        return self.server.sessions | (self._frontend.sessions if self._frontend is not None else set())

    async def _disconnect(self) -> None:
        if self._models is not None:
            await self._models.close()
            self._models = None

    async def _reap(self) -> str:
        """Collect orphans that ended."""
        while True:
            sessions = self._sessions()
            processes.reap(None if self.options.alone else sessions, but=sessions)
            await asyncio.sleep(REAP_SECONDS)

    # --- the server

    async def _keep_server(self, restarted: Callable[[], None]) -> str:
        deaths, backoff = Deaths(), Backoff()
        while True:
            await self._guarded(self._until_server_ends())
            while True:
                assert self.server.process is not None
                how = ended("tritonserver", self.server.process)
                if deaths.add():
                    return f"{how} too often; its last lines ({self.server.log}):\n{self.server.last_lines()}"
                self.display.say(f"{how}, log in {self.server.log}; starting it again")
                await asyncio.sleep(backoff.next())
                if await self._restart_server():
                    break
            backoff.serves()
            self.counters.restart("tritonserver")
            restarted()

    async def _restart_server(self) -> bool:
        """Whether the server runs again, on its ports, with all of its models that load."""
        try:
            await self.server.stop(0)  # its stubs too, and its shared memory
            await self.server.start()
            assert self._models is not None
            await self._models.load(strict=False)
        except OmniError as error:
            self.display.say(f"tritonserver did not come back: {error}")
            return False
        if self.options.warm:
            # Under watch: a model that dies in here is loaded again.
            warm = asyncio.ensure_future(self._models.warm())
            try:
                await self._guarded(asyncio.wait({warm}))
                await warm
            except OmniError as error:
                self.display.say(str(error))
            finally:
                warm.cancel()
        return self.server.running

    async def _guarded(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work` while the models are watched."""
        assert self._models is not None and self.server.process is not None
        guards = Guards(
            self._models.names,
            self.server.process.pid,
            self._models.connection,
            self.options.probing,
            self.counters,
            self.display,
        )
        await first_of(work, guards.run())

    async def _until_server_ends(self) -> None:
        process, models = self.server.process, self._models
        assert process is not None and models is not None
        silent = 0
        while await processes.ended(process, self.options.probing.every or None) is None:
            silent = 0 if await models.connection.live() else silent + 1
            if silent >= (SILENT_STOPPED if processes.stopped([process.pid]) else SILENT) and process.poll() is None:
                self.display.say("tritonserver runs, and answers nothing; ending it")
                process.send_signal(SIGKILL)

    # --- the frontend

    def _make_frontend(self, fields: Mapping[str, Any]) -> Frontend:
        settings: dict[str, Any] = {
            "triton": self.server.address("grpc"),
            "triton_metrics": self.addresses["metrics"],
            "host": self.options.host,
            "port": self.options.openai_port,
            "grace": self.options.server.drain_seconds,
            **fields,
        }
        if self.server.headers:
            settings["triton_headers"] = self.server.headers
        env = {counters.VARIABLE: str(self.options.counts)} if self.options.counts else {}
        return Frontend(settings, self.options.server.log_dir / "frontend.log", env)

    async def _keep_frontend(self, frontend: Frontend) -> str:
        deaths, backoff = Deaths(), Backoff()
        while True:
            assert frontend.process is not None
            await processes.ended(frontend.process)
            how = ended("frontend", frontend.process)
            if deaths.add():
                return f"{how} too often; its last lines ({frontend.log}):\n{tail(frontend.log)}"
            self.display.say(f"{how}, log in {frontend.log}; starting it again")
            await asyncio.sleep(backoff.next())
            await frontend.stop(0)  # its workers
            with suppress(OmniError):
                await frontend.start()
                backoff.serves()
                self.counters.restart("frontend")
                self.display.say("the frontend is back")


def ended(name: str, process: subprocess.Popen[bytes]) -> str:
    """What there is to say of a process that was to go on."""
    code = process.poll()
    how = "did not start" if code is None else f"ended ({f'signal {-code}' if code < 0 else f'status {code}'})"
    return f"{name} {how}"


def _nothing() -> None: ...

"""Everything that one `triton-omni serve` runs: the server, its models, the frontend; started, watched and drained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from types import TracebackType
from typing import Any, Self

from omni_runtime.errors import Internal, NotFound, OmniError
from omni_runtime.kserve import Connection, parameter

from omni_client.launch import edge, ports, processes, shm
from omni_client.launch.progress import Display
from omni_client.launch.triton import ServerOptions, TritonServer
from omni_client.launch.warmup import Warmup

EDGE_SECONDS = 60.0
LOAD_SECONDS = 900.0
WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What is served, and where."""

    server: ServerOptions
    pipelines: tuple[str, ...]
    stages: tuple[str, ...] = ()
    """The models that the pipelines call, in the order to load them: a model stands after those it calls itself."""
    host: str = "127.0.0.1"
    openai_port: int = 9000
    frontend: Mapping[str, Any] | None = field(default_factory=dict)
    """Further fields of the frontend's settings; None runs no frontend."""
    warm: bool = True
    alone: bool = False
    """This process runs nothing besides: at the end every descendant is ended, also one that left its session."""


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
        self._edge: subprocess.Popen[bytes] | None = None
        self._edge_log = options.server.log_dir / "frontend.log"
        self._connection: Connection | None = None
        self._loaded: list[str] = []

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
            self._connection = Connection(self.server.address("grpc"), headers=self.server.headers)
            self.addresses = {
                "http": f"http://{self.server.address('http')}",
                "grpc": self.server.address("grpc"),
                "metrics": f"http://{self.server.address('metrics')}/metrics",
            }
            await self._load()
            if self.options.warm:
                await self._warm()
        if self.options.frontend is not None:
            await self._start_edge(self.options.frontend)

    async def died(self) -> str:
        """Wait until the server or the frontend has ended; says which, how, and its last log lines.

        Orphans that end meanwhile are collected.
        """
        watched = {"tritonserver": self.server.process, "frontend": self._edge}
        while True:
            for name, process in watched.items():
                if process is not None and process.poll() is not None:
                    how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
                    log, last = self.server.log, self.server.last_lines()
                    if name == "frontend":
                        log, last = self._edge_log, _tail(self._edge_log)
                    return f"{name} ended ({how}); its last lines ({log}):\n{last}"
            sessions = self._sessions()
            processes.reap(sessions, but=sessions)
            waits = [processes.ended(process, WATCH_SECONDS) for process in watched.values() if process is not None]
            tasks = [asyncio.ensure_future(wait) for wait in waits]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self) -> None:
        """Refuse at the edge, finish what runs, unload pipelines, then stages, end the server; within the time set."""
        seconds = self.options.server.drain_seconds
        limit = asyncio.get_running_loop().time() + seconds

        def left() -> float:
            return max(0.1, limit - asyncio.get_running_loop().time())

        with self.display.task("draining", 3) as step:
            if self._edge is not None and self._edge.poll() is None:
                self._edge.send_signal(SIGTERM)
                await processes.ended(self._edge, left())
            step("frontend")
            # Pipelines first: a request that runs still needs the stages it has not reached.
            pipelines = [name for name in self._loaded if name in self.options.pipelines]
            await self._unload(pipelines, left)
            step("pipelines")
            await self._unload([name for name in self._loaded if name not in pipelines], left)
            await self._disconnect()
            # With its models gone it ends within a second; what did not finish in time ends here.
            await self.server.stop(max(5.0, left()))
            step("server")

    async def close(self) -> None:
        """End at once whatever still runs; no process and no shared memory of this stack remains."""
        await self._disconnect()
        if self._edge is not None and self._edge.poll() is None:
            self._edge.kill()
            await processes.ended(self._edge)
        await self.server.stop(0)
        processes.end_all(None if self.options.alone else self._sessions())
        self.server.release()

    def _sessions(self) -> set[int]:
        # Each child leads a session of its own, which what it starts belongs to, also once it is orphaned.
        return {*self.server.sessions, *([self._edge.pid] if self._edge is not None else [])}

    def _admin(self) -> Connection:
        assert self._connection is not None
        return self._connection

    async def _disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _load(self) -> None:
        names = [*self.options.stages, *(name for name in self.options.pipelines if name not in self.options.stages)]
        with self.display.task("loading", len(names)) as step:
            for name in names:
                step(doing=name)
                try:
                    await self._or_death(self._admin().load(name, LOAD_SECONDS))
                except OmniError as error:
                    raise type(error)(
                        f"{name} did not load: {error}\nits last lines ({self.server.log}):\n{self.server.last_lines()}"
                    ) from None
                self._loaded.append(name)
                step(name)

    async def _warm(self) -> None:
        configs = {name: await self._admin().config(name) for name in self.options.pipelines}
        warmup = Warmup(self._admin())
        order = warmup.order({name: parameter(config, "task") for name, config in configs.items()})
        with self.display.task("warming", len(order)) as step:
            for name in order:
                step(doing=name)
                try:
                    await self._or_death(warmup.warm(name, configs[name]))
                except OmniError as error:
                    raise type(error)(f"{name} loaded, and failed its first request: {error}") from None
                step(name)

    async def _or_death(self, work: Any) -> None:
        """Run `work`; a server that ends meanwhile ends it at once."""
        task = asyncio.ensure_future(work)
        assert self.server.process is not None
        death = asyncio.ensure_future(processes.ended(self.server.process))
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Internal("tritonserver ended")
            await task
        finally:
            for future in (task, death):
                future.cancel()
            await asyncio.gather(task, death, return_exceptions=True)

    async def _unload(self, names: Iterable[str], left: Any) -> None:
        waiting = set(names)
        for name in waiting:
            with suppress(OmniError):
                await self._admin().unload(name, left())
        # The call returns while requests still run; the index says when the last one has ended.
        while waiting and self.server.running and left() > 0.1:
            with suppress(OmniError):
                states = {row["name"]: row.get("state") for row in await self._admin().index()}
                waiting = {name for name in waiting if states.get(name) in ("READY", "UNLOADING")}
            if waiting:
                await asyncio.sleep(0.05)

    async def _start_edge(self, fields: Mapping[str, Any]) -> None:
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
        self._edge, reader = edge.start(settings, self._edge_log)
        where = await edge.address(reader, EDGE_SECONDS)
        if where is None:
            raise Internal(f"the frontend did not start; its last lines ({self._edge_log}):\n{_tail(self._edge_log)}")
        self.addresses["openai"] = f"{where}/v1"


def _tail(path: Path, count: int = 12) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
        return "\n".join(line.decode(errors="replace")[:400] for line in file.read().splitlines()[-count:])
    return ""


def order_of(pipelines: Iterable[str], called_by: Mapping[str, Iterable[str]]) -> list[str]:
    """The models below `pipelines`, each once and after those it calls (pipelines that another calls included).

    Raises:
        NotFound: a model that is called does not exist.
    """
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise Internal(f"{' -> '.join((*path, name))}: a pipeline calls itself")
        if name not in called_by:
            raise NotFound(f"{path[-1] if path else 'the request'} names {name!r}, which is in no repository")
        for child in called_by[name]:
            visit(child, (*path, name))
        if name not in order:
            order.append(name)

    for pipeline in pipelines:
        visit(pipeline, ())
    return order

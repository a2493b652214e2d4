"""Everything that one `triton-omni serve` runs: the server, its models, the frontend; started, watched and drained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from types import TracebackType
from typing import Any, Self

from omni_runtime.errors import Internal, InvalidRequest, OmniError
from omni_runtime.kserve import Connection, parameter

from omni_client.launch import edge, ports, processes, shm
from omni_client.launch.progress import Display
from omni_client.launch.triton import ServerOptions, TritonServer
from omni_client.launch.warmup import Warmup

EDGE_SECONDS = 60.0
LOAD_SECONDS = 900.0
WATCH_SECONDS = 1.0
LOADS_AT_ONCE = 4


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
        self._loaded: list[list[str]] = []

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
            processes.reap(None if self.options.alone else sessions, but=sessions)
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

        loaded = [level for level in self._loaded if level]
        with self.display.task("draining", len(loaded) + 1 + (self._edge is not None)) as step:
            if self._edge is not None:
                if self._edge.poll() is None:
                    self._edge.send_signal(SIGTERM)
                    await processes.ended(self._edge, left())
                step("frontend")
            # Callers go first: a request that runs still needs the models that it has not reached.
            for level in reversed(loaded):
                await self._unload(level, left)
                step(" ".join(level))
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
        at_once = asyncio.Semaphore(max(1, min(LOADS_AT_ONCE, os.cpu_count() or 1)))
        with self.display.task("loading", sum(map(len, self.options.levels))) as step:

            async def load(name: str, loaded: list[str]) -> None:
                async with at_once:
                    step(doing=name)
                    try:
                        await self._admin().load(name, LOAD_SECONDS)
                    except OmniError as error:
                        last = self.server.last_lines()
                        raise type(error)(
                            f"{name} did not load: {error}\n{self.server.log} ends with:\n{last}"
                        ) from None
                    loaded.append(name)
                    step(name)

            for level in self.options.levels:
                self._loaded.append([])
                await self._or_death(gathered(load(name, self._loaded[-1]) for name in level))

    async def _warm(self) -> None:
        configs = {name: await self._admin().config(name) for level in self._loaded for name in level}
        tasks = {name: task for name, config in configs.items() if (task := parameter(config, "task"))}
        warmup = Warmup(self._admin())
        with self.display.task("warming", len(tasks)) as step:
            for name in warmup.order(tasks):
                step(doing=name)
                try:
                    await self._or_death(warmup.warm(name, tasks[name]))
                except OmniError as error:
                    raise type(error)(f"{name} loaded, and failed its first request: {error}") from None
                step(name)

    async def _or_death(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work`; a server that ends meanwhile ends it at once."""
        task = asyncio.create_task(work)
        assert self.server.process is not None
        death = asyncio.create_task(processes.ended(self.server.process))
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Internal("tritonserver ended")
            await task
        finally:
            for future in (task, death):
                future.cancel()
            await asyncio.gather(task, death, return_exceptions=True)

    async def _unload(self, names: Iterable[str], left: Callable[[], float]) -> None:
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
        # An address to call, not the one that stands for all.
        where = where.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        self.addresses["openai"] = f"{where}/v1"


def _tail(path: Path, count: int = 12) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
        return "\n".join(line.decode(errors="replace")[:400] for line in file.read().splitlines()[-count:])
    return ""


async def gathered(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of `work`; the first error cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def levels_of(pipelines: Iterable[str], calls: Callable[[str], Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """`pipelines` and every model below them, each once, in levels: a model stands above all that it calls.

    `calls(name)` says which models a model calls, and raises NotFound for one that does not exist.

    Raises:
        InvalidRequest: a model calls itself, perhaps through others.
    """
    heights: dict[str, int] = {}

    def height(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise InvalidRequest(f"{' -> '.join((*path, name))}: a pipeline calls itself")
        if name not in heights:
            heights[name] = max((1 + height(child, (*path, name)) for child in calls(name)), default=0)
        return heights[name]

    top = max((height(name, ()) for name in pipelines), default=-1)
    return tuple(tuple(name for name in heights if heights[name] == level) for level in range(top + 1))

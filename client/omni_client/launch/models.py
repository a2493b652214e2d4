"""The models of one server: loaded callees first, warmed with a real request, unloaded callers first."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from omni_runtime.errors import Internal, InvalidRequest, OmniError
from omni_runtime.kserve import Connection, parameter
from omni_runtime.stubs import stub_pids

from omni_client.launch import processes
from omni_client.launch.progress import Display
from omni_client.launch.triton import TritonServer
from omni_client.launch.warmup import Warmup

LOAD_SECONDS = 900.0
LOADS_AT_ONCE = 4
_ALIVE = ("READY", "LOADING", "UNLOADING")


class Models:
    """Made for a server that runs; `levels` as :func:`levels_of` makes them."""

    def __init__(self, levels: Iterable[Iterable[str]], server: TritonServer, display: Display) -> None:
        self.levels = tuple(tuple(level) for level in levels)
        self.connection = Connection(server.address("grpc"), headers=server.headers)
        self._server = server
        self._display = display
        self._loaded: list[list[str]] = []

    @property
    def names(self) -> list[str]:
        return [name for level in self.levels for name in level]

    async def close(self) -> None:
        await self.connection.close()

    async def load(self, *, strict: bool = True) -> None:
        """Load them all. Not `strict`: one that does not load is told of, and left to whoever watches it.

        Raises:
            OmniError: a model did not load, or the server ended.
        """
        at_once = asyncio.Semaphore(max(1, min(LOADS_AT_ONCE, os.cpu_count() or 1)))
        with self._display.task("loading", len(self.names)) as step:

            async def load(name: str, loaded: list[str]) -> None:
                async with at_once:
                    step(doing=name)
                    try:
                        await self.connection.load(name, LOAD_SECONDS)
                    except OmniError as error:
                        last = f"{self._server.log} ends with:\n{self._server.last_lines()}"
                        if strict:
                            raise type(error)(f"{name} did not load: {error}\n{last}") from None
                        self._display.say(f"{name} did not load: {error}")
                        return
                    loaded.append(name)
                    step(name)

            for level in self.levels:
                self._loaded.append([])
                await self._or_death(gathered(load(name, self._loaded[-1]) for name in level))

    async def warm(self) -> None:
        """Ask each pipeline that is loaded something.

        Raises:
            OmniError: one failed, or the server ended.
        """
        configs = {name: await self.connection.config(name) for level in self._loaded for name in level}
        tasks = {name: task for name, config in configs.items() if (task := parameter(config, "task"))}
        warmup = Warmup(self.connection)
        with self._display.task("warming", len(tasks)) as step:
            for name in warmup.order(tasks):
                step(doing=name)
                try:
                    await self._or_death(warmup.warm(name, tasks[name]))
                except OmniError as error:
                    raise type(error)(f"{name} loaded, and failed its first request: {error}") from None
                step(name)

    async def unload(self, left: Callable[[], float], step: Callable[[str], None]) -> bool:
        """Unload level by level, each once what runs there has ended; `left` says how many seconds there are.

        Callers go first: a request that runs still needs the models that it has not reached. Returns whether the
        server has no model left, and so nothing to wait for.
        """
        for level in reversed(self.levels):
            await self._unload(level, left)
            step(" ".join(level))
        with suppress(OmniError):
            return not any(row.get("state") in _ALIVE for row in await self.connection.index())
        return False

    async def _unload(self, names: Iterable[str], left: Callable[[], float]) -> None:
        waiting = set(names)
        assert self._server.process is not None
        server = self._server.process.pid
        ran = {name for name in waiting if stub_pids(server, name)}
        for name in waiting:
            with suppress(OmniError):
                await self.connection.unload(name, left())
        # The call returns while requests still run; the index says when the last one has ended.
        while waiting and self._server.running and left() > 0.1:
            with suppress(OmniError):
                states = {row["name"]: row.get("state") for row in await self.connection.index()}
                waiting = {name for name in waiting if states.get(name) in _ALIVE}
            # What was under way in a process that died never ends, and Triton waits for it.
            waiting -= {name for name in ran & waiting if not stub_pids(server, name)}
            if waiting:
                await asyncio.sleep(0.05)

    async def _or_death(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work`; a server that ends meanwhile ends it at once."""
        task = asyncio.create_task(work)
        assert self._server.process is not None
        death = asyncio.create_task(processes.ended(self._server.process))
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Internal("tritonserver ended")
            await task
        finally:
            for future in (task, death):
                future.cancel()
            await asyncio.gather(task, death, return_exceptions=True)


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

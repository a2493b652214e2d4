"""Which pipelines there are, as the server itself tells: its index, and each pipeline's configuration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from omni_runtime.errors import NotFound, OmniError, StageUnavailable
from omni_runtime.kserve import Connection, parameter

from omni_client.frontend.errors import ApiError, refused
from omni_client.frontend.pools import Pools

# A name that nobody knows makes the frontend ask again, but no more often than this.
_IMPATIENCE = 1.0
_ASK_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One pipeline, from its configuration."""

    name: str
    task: str
    voices: tuple[str, ...]
    stages: tuple[str, ...]
    inputs: frozenset[str]
    outputs: frozenset[str]

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> Pipeline:
        return cls(
            name,
            parameter(config, "task"),
            _listed(config, "voices"),
            _listed(config, "stages"),
            frozenset(tensor["name"] for tensor in config.get("input", [])),
            frozenset(tensor["name"] for tensor in config.get("output", [])),
        )

    def voice(self, asked: str | None, param: str) -> dict[str, str]:
        """The pipeline's params for the voice asked for: {} for its default. NotFound names those there are."""
        if asked is None or asked == "default":
            return {}
        if asked not in self.voices:
            there = ", ".join(self.voices) or "only its default"
            raise NotFound(f"{self.name} has no voice {asked!r}; it has {there}", param=param)
        return {"voice": asked}


def _listed(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in parameter(config, name).split(",") if item.strip())


class Catalog:
    """Asks the server at most every `refresh` seconds; raises StageUnavailable when it does not answer."""

    def __init__(self, connection: Connection, pools: Pools, aliases: Mapping[str, str], refresh: float) -> None:
        self.connection, self.pools, self.aliases, self.refresh = connection, pools, dict(aliases), refresh
        self.created = int(time.time())
        # Every model by name; None for those that are no pipelines, which need not be asked again.
        self._known: dict[str, Pipeline | None] = {}
        self._ready: frozenset[str] = frozenset()
        self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Keeps what is known fresh, so that requests need not wait for it; never returns."""
        while True:
            with suppress(OmniError):
                await self.pipelines()
            await asyncio.sleep(max(0.1, self.refresh))

    async def pipelines(self, age: float | None = None) -> dict[str, Pipeline]:
        """By name, sorted: what is loaded, and what was when last seen. At most `age` seconds old."""
        age = self.refresh if age is None else age
        if self._asked < time.monotonic() - age:
            # Whoever comes while another asks is served by that answer, or that error.
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask())
                self._asking.add_done_callback(_looked_at)
            await asyncio.shield(self._asking)
        return self._pipelines()

    def _pipelines(self) -> dict[str, Pipeline]:
        return {name: pipeline for name, pipeline in sorted(self._known.items()) if pipeline is not None}

    async def find(self, model: str, task: str) -> Pipeline:
        """The pipeline of that name or alias. ApiError 404 when there is none, 400 when it is for another task."""
        name = self.aliases.get(model, model)
        pipelines = self._pipelines()
        # One that works is called without asking whether it is there.
        if name not in pipelines or not self._works(name):
            pipelines = await self.pipelines()
        if name not in pipelines:
            pipelines = await self.pipelines(_IMPATIENCE)
        if name not in pipelines:
            raise ApiError(
                404, f"there is no model {model!r}; there are {', '.join(self._names(pipelines)) or 'none'}",
                param="model", code="model_not_found",
            )  # fmt: skip
        if pipelines[name].task != task:
            fitting = [other for other, pipeline in self.names(pipelines).items() if pipeline.task == task]
            raise refused(
                f"model {model!r} is for {pipelines[name].task}, this route is for {task}; "
                f"for that there are {', '.join(fitting) or 'none'}",
                "model", "wrong_task",
            )  # fmt: skip
        if not self._works(name):
            await self.pipelines(_IMPATIENCE)
            if not self._works(name):
                raise StageUnavailable(f"no replica of {name} is alive", param="model", stage=name)
        return pipelines[name]

    async def states(self) -> dict[str, dict[str, Any]]:
        """Per pipeline, asked now: whether it and every stage it calls, at any depth, are loaded and alive, and what
        is not."""
        pipelines = await self.pipelines(0.0)
        states = {}
        for name in pipelines:
            missing = sorted(member for member in self._members(name) if not self._works(member))
            state = "ready" if not missing else "unavailable" if name in missing else "degraded"
            states[name] = {"task": pipelines[name].task, "state": state, "not_ready": missing}
        return states

    def names(self, pipelines: Mapping[str, Pipeline]) -> dict[str, Pipeline]:
        """Every name a client may use, aliases too."""
        return {name: pipelines[self.aliases.get(name, name)] for name in self._names(pipelines)}

    def _names(self, pipelines: Mapping[str, Pipeline]) -> list[str]:
        return [*pipelines, *(alias for alias, name in self.aliases.items() if name in pipelines)]

    def _members(self, name: str) -> set[str]:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            member = waiting.pop()
            if member not in seen:
                seen.add(member)
                pipeline = self._known.get(member)
                waiting.extend(pipeline.stages if pipeline is not None else ())
        return seen

    def _works(self, name: str) -> bool:
        return self.pools.works(name, self._ready)

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                await self._read()
        except TimeoutError:
            raise StageUnavailable(f"the server did not answer within {_ASK_SECONDS:g} s") from None
        for name in self._pipelines():
            for member in self._members(name):
                self.pools.of(member)

    async def _read(self) -> None:
        index = await self.connection.index()
        self._ready = frozenset(entry["name"] for entry in index if entry.get("state") == "READY")
        # A reload may have changed a configuration, so those of pipelines are read again.
        names = [name for name in self._ready if self._known.get(name, ...) is not None]
        configs = await asyncio.gather(*(self._config(name) for name in names))
        for name, config in zip(names, configs, strict=True):
            if config is not None:
                pipeline = Pipeline.from_config(name, config)
                # A further replica of a pipeline is no pipeline of its own.
                served = pipeline.task and not parameter(config, "replica_of")
                self._known[name] = pipeline if served else None
        listed = {entry["name"] for entry in index}
        self._known = {name: pipeline for name, pipeline in self._known.items() if name in listed}
        self._asked = time.monotonic()

    async def _config(self, name: str) -> dict[str, Any] | None:
        try:
            return await self.connection.config(name)
        except OmniError:
            if not await self.connection.live():
                raise
            return None  # unloaded since the index was read


def _looked_at(task: asyncio.Task[None]) -> None:
    """Those who waited for it may all be gone; its error then is nobody's."""
    if not task.cancelled():
        task.exception()

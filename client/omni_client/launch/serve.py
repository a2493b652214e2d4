"""What `triton-omni serve` does, from the names of pipelines to the last process gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omni_build import families, paths
from omni_build.plan import plan
from omni_build.repository import Repository
from omni_build.server import find_server, make_backends
from omni_build.store import Store
from omni_runtime.errors import InvalidRequest, NotFound, OmniError
from omni_runtime.reload import SUPERVISED

from omni_client.launch import replicas
from omni_client.launch.guard import Probing
from omni_client.launch.progress import Display
from omni_client.launch.stack import Stack, StackOptions, levels_of
from omni_client.launch.triton import LOOPBACK, ServerOptions

# With a heap for each of its hundred threads the server keeps several times what it uses.
MALLOC = {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "2")}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags of `triton-omni serve`."""

    pipelines: tuple[str, ...] = ()
    """Empty: every pipeline of the repositories."""
    repositories: tuple[Path, ...] = ()
    """Model repositories to serve instead of the ones that triton-omni brings."""
    store: Path | None = None
    host: str = LOOPBACK
    triton_host: str = LOOPBACK
    triton_key: str | None = None
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    openai_port: int = 9000
    frontend: Mapping[str, Any] | None = field(default_factory=dict)
    drain_seconds: float = 30.0
    log_dir: Path | None = None
    triton_arguments: tuple[str, ...] = ()
    alone: bool = True
    supervised: bool = True
    """The stack is supervised: what runs in the server need not reload models by itself."""
    probing: Probing = field(default_factory=Probing)
    replicas: Mapping[str, int] = field(default_factory=dict)
    """How often a model is served, where that is more than once."""


def prepare(options: ServeOptions, display: Display, folder: Path | None = None) -> StackOptions:
    """Build what is missing, check that it fits, find the server: everything before a process is started.

    `folder` is an empty one for what is made for this run alone; replicas want one.

    Raises:
        NotFound: a pipeline that does not exist; the message lists those that do.
        InvalidRequest: it does not fit this machine.
        StageUnavailable: no server is installed; the message names the command that brings one.
    """
    store = Store(options.store)
    own = (paths.model_repository(), paths.ensembles())
    repositories = tuple(path.absolute() for path in options.repositories or own)
    for path in repositories:
        if not path.is_dir():
            raise NotFound(f"no model repository in {path}", param="repository")
    repository = Repository(list(repositories))
    names = repository.names()
    pipelines = options.pipelines or tuple(name for name in names if repository.task(name))
    for pipeline in pipelines:
        if pipeline not in names:
            raise NotFound(f"no pipeline {pipeline!r}; there are: {', '.join(sorted(names))}", param="pipeline")
    if not options.repositories:
        for pipeline in pipelines:
            if pipeline in families.NAMES:
                families.build(pipeline, store, *own, display)
    levels = levels_of(pipelines, repository.calls)
    replicas.check(options.replicas, unique(name for level in levels for name in level), repository)
    if folder is not None and any(count > 1 for count in options.replicas.values()):
        repository = replicas.write(options.replicas, repository, folder / "models")
        repositories = tuple(repository.paths)
        levels = replicas.levels_with(options.replicas, levels)
    needs = plan([name for level in levels for name in level], repository)
    for line in needs.lines()[1 + len(needs.needs) :]:  # the sums; `triton-omni plan` shows the table
        display.say(line)
    server = find_server()
    return StackOptions(
        server=ServerOptions(
            binary=server.binary,
            backends=make_backends(store, server),
            repositories=repositories,
            env={**MALLOC, **server.env, "OMNI_STORE": str(store.path), SUPERVISED: str(int(options.supervised))},
            host=options.triton_host,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            key=options.triton_key,
            drain_seconds=options.drain_seconds,
            log_dir=(options.log_dir or store.path / "logs").absolute(),
            arguments=options.triton_arguments,
        ),
        levels=levels,
        host=options.host,
        openai_port=options.openai_port,
        frontend=options.frontend,
        alone=options.alone,
        probing=options.probing,
        counts=folder / "supervision.prom" if folder is not None else None,
    )


class Stop:
    """SIGTERM and the first SIGINT ask for a drain, a second signal for an end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.asked.is_set() and number == signal.SIGINT:
            self.at_once.set()
        self.asked.set()


async def run(options: StackOptions, display: Display, verbose: bool = False) -> int:
    """Start, say `ready`, serve until a signal; the exit status. Each restart of the server is a line `restarted`."""
    stop = Stop()
    async with Stack(options, display) as stack:
        echo = asyncio.create_task(follow(stack.server.log)) if verbose else None
        try:
            if await first(stack.start(), stop.asked.wait()):
                display.say("stopped before it was ready")
                return 0
            addresses = " ".join(f"{name}={address}" for name, address in stack.addresses.items())
            print(f"ready {addresses}", flush=True)
            say_restarted = partial(print, f"restarted {addresses}", flush=True)
            if stack.server.key and not options.server.key:
                display.say("Triton's repository, shared-memory, trace and log APIs want the header")
                display.say(f"  omni-key: {stack.server.key}")
            supervision = asyncio.create_task(stack.supervise(say_restarted))
            if not await first(supervision, stop.asked.wait()):
                print(f"triton-omni: {supervision.result()}", file=sys.stderr)
                return 1
            if await first(stack.drain(), stop.at_once.wait()):
                return 128 + signal.SIGINT
            return 0
        finally:
            if echo is not None:
                echo.cancel()
                await asyncio.gather(echo, return_exceptions=True)


async def first(work: Any, other: Any) -> bool:
    """Run both until one ends, and cancel the other; True when `other` came first. Errors of `work` are raised."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.wait(tasks)
    if tasks[0].cancelled():
        return True
    tasks[0].result()
    return False


async def follow(log: Path) -> None:
    """Copy what is appended to `log` to stderr."""

    def copy(position: int | None) -> int:
        if not log.exists():
            return 0
        with log.open("rb") as file:
            if position is None:  # what earlier servers wrote
                return file.seek(0, os.SEEK_END)
            file.seek(position)
            sys.stderr.write(file.read().decode(errors="replace"))
            sys.stderr.flush()
            return file.tell()

    position = copy(None)
    while True:
        position = copy(position)
        await asyncio.sleep(0.2)


def main(options: ServeOptions, verbose: bool = False) -> int:
    """`triton-omni serve`: 0 after a clean end, 2 for a request that makes no sense, 1 for a failure."""
    display = Display()
    try:
        with tempfile.TemporaryDirectory(prefix="triton-omni-") as folder:
            return asyncio.run(run(prepare(options, display, Path(folder)), display, verbose))
    except (InvalidRequest, NotFound) as error:
        print(f"triton-omni: {error}", file=sys.stderr)
        return 2
    except OmniError as error:
        print(f"triton-omni: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """`names` without repetitions, in order."""
    return tuple(dict.fromkeys(names))

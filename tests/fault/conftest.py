"""Servers to break: repositories with replicas, a bare tritonserver, and what a caller sees of them."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import aclosing
from dataclasses import dataclass

import pytest
from omni_build.server import find_server, make_backends
from omni_build.store import Store
from omni_runtime import stubs
from omni_runtime.errors import OmniError
from omni_runtime.kserve import Connection, text
from omni_runtime.kserve_sync import SyncConnection

DEADLINE = 90
# As `serve` sets it: a heap for each of a hundred threads would look like a leak.
MALLOC = {"MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Server:
    """A bare tritonserver: nobody but the scripts in it looks after it."""

    grpc_url: str
    http_url: str
    metrics_url: str
    pid: int


def free_ports(count):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def tritonserver(directory, models, *repositories, arguments=(), **environment):
    """A server of its own, with ``models`` loaded; everything it started is ended with the block."""
    server = find_server()
    http, grpc, metrics = free_ports(3)
    prefix = f"fault{grpc}-"
    command = [
        str(server.binary),
        *(f"--model-repository={each}" for each in repositories),
        f"--backend-directory={make_backends(Store(None), server)}",
        "--model-control-mode=explicit",
        "--exit-on-error=false",
        *(f"--load-model={each}" for each in models),
        *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc")),
        *(f"--{name}-port={port}" for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics))),
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--exit-timeout-secs=5",
        *arguments,
    ]
    log = (directory / f"tritonserver-{grpc}.log").open("wb")
    process = subprocess.Popen(
        command, env=os.environ | MALLOC | server.env | environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        with contextlib.closing(SyncConnection(f"127.0.0.1:{grpc}")) as connection:
            limit = time.monotonic() + DEADLINE
            while not all(connection.ready(each) for each in models):
                assert process.poll() is None and time.monotonic() < limit, f"the server did not start, see {log.name}"
                time.sleep(0.05)
        yield Server(
            f"127.0.0.1:{grpc}", f"http://127.0.0.1:{http}", f"http://127.0.0.1:{metrics}/metrics", process.pid
        )
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


def replicate(repository, model, *listed, copies=1):
    """Give ``model`` of ``repository`` further replicas: ``copies`` folders beside it, and those ``listed``."""
    names = [f"{model}_{number + 1}" for number in range(copies)]
    for name in names:
        shutil.copytree(repository / model, repository / name, symlinks=True)
    config = repository / model / "config.pbtxt"
    written = config.read_text()
    config.unlink()
    replicas = ", ".join([*names, *listed])
    config.write_text(f'{written}\nparameters {{ key: "replicas" value {{ string_value: "{replicas}" }} }}\n')
    return names


@pytest.fixture(scope="session")
def repository(built, tmp_path_factory):
    """A copy of the built repository, to be changed."""

    def copy():
        folder = tmp_path_factory.mktemp("fault") / "repository"
        shutil.copytree(built, folder, symlinks=True)
        return folder

    return copy


@dataclass
class Outcome:
    """What one caller saw: the chunks, and the error that ended them, if one did."""

    chunks: list
    error: OmniError | None
    seconds: float

    @property
    def kind(self):
        return type(self.error).__name__ if self.error else "success"

    @property
    def text(self):
        return "".join(text(chunk, "text") for chunk in self.chunks)


async def ask(connection, model, inputs, started=None, **options):
    """One request to its end; ``started`` is set at its first chunk."""
    begun, chunks = time.monotonic(), []
    try:
        async with aclosing(connection.stream(model, inputs, timeout=DEADLINE, **options)) as answer:
            async for chunk in answer:
                chunks.append(chunk)
                if started is not None:
                    started.set()
    except OmniError as error:
        return Outcome(chunks, error, time.monotonic() - begun)
    return Outcome(chunks, None, time.monotonic() - begun)


def chatting(seed, tokens=48, **settings):
    """A request to ``smollm2`` that makes ``tokens`` tokens."""
    values = {"seed": seed, "temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, **settings}
    return {"text": "Once upon a time", "stream": True, "params": json.dumps(values)}


def speaking(seed, sentences=3, stream=True):
    words = " ".join(f"This is sentence number {number}." for number in range(sentences))
    return {"text": words, "stream": stream, "params": json.dumps({"seed": seed})}


async def until(check, seconds=DEADLINE):
    """Wait until ``check`` (a coroutine function) is true."""
    async with asyncio.timeout(seconds):
        while True:
            if await check():
                return
            await asyncio.sleep(0.05)


async def serves(connection, model, inputs):
    """Wait until ``model`` answers ``inputs``."""

    async def answers():
        return (await ask(connection, model, inputs)).error is None

    await until(answers)


def kill(server, model, number=signal.SIGKILL):
    """Send ``number`` to the first stub of ``model``; its pid."""
    pid = stubs.stub_pids(server.pid, model)[0]
    os.kill(pid, number)
    return pid


async def status(connection, model):
    """What a loop stage says of itself."""
    async with aclosing(connection.stream(model, {"control": "status"}, outputs=["status"], timeout=30)) as answer:
        (found,) = [json.loads(text(chunk, "status")) async for chunk in answer]
    return found


async def idle(connection, model):
    """Whether nothing runs or waits in a loop stage."""
    found = await status(connection, model)
    return found["running"] == found["waiting"] == 0


async def idle_everywhere(connection, models):
    """Wait until nothing runs or waits in any of ``models``."""

    async def all_idle():
        # Callers first: what they have begun shows in those that they call.
        return all([await idle(connection, model) for model in reversed(models)])

    await until(all_idle)


@contextlib.asynccontextmanager
async def connected(server):
    connection = Connection(server.grpc_url)
    try:
        yield connection
    finally:
        await connection.close()

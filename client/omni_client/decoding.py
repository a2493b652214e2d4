"""Files from strangers are decoded in worker processes, with limits on time, memory and decoded size.

A codec is C code that reads what an attacker wrote. A worker that dies, hangs or eats memory ends the one request it
had and is replaced; the server goes on. The file and its samples travel in anonymous memory files, not through the
pipe, so the caller holds one copy of the samples and the worker a few blocks of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import os
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from omni_runtime.errors import TYPES, Cancelled, DeadlineExceeded, Internal, InvalidRequest, Overloaded

from omni_client.decoder import MAX_SECONDS, Samples

_START_SECONDS = 60.0
# The worker's own alarm ends it first; this is for one that was stopped.
_GRACE_SECONDS = 2.0
# Freed memory is not always returned: a worker is renewed before its past counts against a request's limit.
_RENEW_AFTER = 64
_ENVIRONMENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one file may cost: decoding time, memory beyond the idle worker's, samples' bytes, audio length."""

    seconds: float = 60.0
    memory_bytes: int = 512 << 20
    decoded_bytes: int = 1536 << 20
    max_seconds: float = MAX_SECONDS


class DecoderPool:
    """Decodes in at most `workers` processes at once; `max_waiting` further calls wait, the rest are Overloaded.

    Use it as an async context manager, or `close()` it. `peak_bytes` is the largest resident size a worker has had.
    """

    def __init__(self, *, workers: int = 2, max_waiting: int = 256, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.peak_bytes = 0
        self._workers, self._max_waiting = workers, max_waiting
        self._slots = asyncio.Semaphore(workers)
        self._waiting = 0
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._dying: list[Process] = []
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every worker now, so that the first requests need not wait for one."""
        while len(self._idle) + len(self._busy) < self._workers:
            self._idle.append(await _Worker.start(self.limits))

    async def decode(
        self, data: bytes | memoryview, *, sample_rate: int | None = None, param: str = "file"
    ) -> tuple[Samples, int]:
        """The samples of an audio file as (mono float32 [n] in [-1, 1], rate in Hz), as `audio.decode`.

        `sample_rate` resamples while decoding, which keeps long files small. InvalidRequest naming `param` for a file
        that cannot be decoded within the limits, DeadlineExceeded when it takes too long, Overloaded when too many
        wait.
        """
        if self._slots.locked() and self._waiting >= self._max_waiting:
            raise Overloaded("too many files wait to be decoded", retry_after=1.0)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._decode(data, sample_rate, param)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """End every worker; a request that runs ends with Cancelled."""
        self._closed = True
        for worker in self._idle:
            self._drop(worker)
        self._idle.clear()
        for worker in self._busy:
            # Its socket stays open: the request that waits there reads the end of it.
            self._dying.append(worker.kill())
        await asyncio.gather(*(process.wait() for process in self._dying))
        self._dying.clear()

    async def _decode(self, data: bytes | memoryview, sample_rate: int | None, param: str) -> tuple[Samples, int]:
        if self._closed:
            raise Cancelled("the decoder is closed")
        worker = self._idle.pop() if self._idle else await _Worker.start(self.limits)
        self._busy.add(worker)
        keep = False
        try:
            async with asyncio.timeout(self.limits.seconds + _GRACE_SECONDS):
                reply, samples = await worker.decode(data, {"sample_rate": sample_rate, "param": param})
            keep = worker.served < _RENEW_AFTER and reply.get("reason") != "memory"
        except TimeoutError:
            raise self._too_slow(param) from None
        except EOFError:
            if self._closed:
                raise Cancelled("the decoder was closed while it decoded the audio") from None
            if await worker.ran_out_of_time():
                raise self._too_slow(param) from None
            raise InvalidRequest("the audio cannot be decoded: its decoder crashed", param=param) from None
        finally:
            self._busy.discard(worker)
            if keep and not self._closed:
                self._idle.append(worker)
            else:
                self._drop(worker)
        self.peak_bytes = max(self.peak_bytes, int(reply.get("peak_bytes", 0)))
        if samples is None:
            raise TYPES.get(str(reply.get("type")), Internal)(str(reply.get("message")), param=param)
        return samples, int(reply["sample_rate"])

    def _too_slow(self, param: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"the audio takes longer than {self.limits.seconds:g} s to decode", param=param)

    def _drop(self, worker: _Worker) -> None:
        self._dying = [process for process in self._dying if process.returncode is None]
        self._dying.append(worker.kill())
        worker.link.close()


class _Worker:
    """One process of `decoding_worker` and the socket to it."""

    def __init__(self, process: Process, link: socket.socket) -> None:
        self.served = 0
        self._process, self.link = process, link

    @classmethod
    async def start(cls, limits: Limits) -> _Worker:
        """A worker that is ready to decode."""
        link, theirs = socket.socketpair()
        link.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "omni_client.decoding_worker", str(theirs.fileno()),
                stdin=DEVNULL, stdout=DEVNULL, pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )  # fmt: skip
        worker = cls(process, link)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.get_running_loop().sock_sendall(link, json.dumps(asdict(limits)).encode() + b"\n")
                await worker._reply()
        except (EOFError, OSError, TimeoutError):
            await worker.discard()
            raise Internal("a decoder process did not start") from None
        except BaseException:
            await worker.discard()
            raise
        return worker

    async def decode(self, data: bytes | memoryview, request: dict[str, Any]) -> tuple[dict[str, Any], Samples | None]:
        """The worker's reply, and the samples unless it refused. EOFError when it died."""
        with _MemoryFile() as source, _MemoryFile() as target:
            await asyncio.to_thread(source.write, data)
            try:
                socket.send_fds(self.link, [json.dumps(request).encode() + b"\n"], [source.fd, target.fd])
            except OSError as error:
                raise EOFError from error
            self.served += 1
            reply = await self._reply()
            return reply, target.samples() if reply.get("samples") else None

    async def ran_out_of_time(self) -> bool:
        return -await self._process.wait() == _SIGALRM

    async def discard(self) -> None:
        self.link.close()
        await self.kill().wait()

    def kill(self) -> Process:
        if self._process.returncode is None:
            self._process.kill()
        return self._process

    async def _reply(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = await asyncio.get_running_loop().sock_recv(self.link, 65_536)
            except OSError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            line += part
        return dict(json.loads(line))


_SIGALRM = 14


class _MemoryFile:
    """An unnamed file in memory (on disk where the system has no memfd) that a worker can be given."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("omni-audio", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self.fd, view) :]
        os.lseek(self.fd, 0, os.SEEK_SET)

    def samples(self) -> Samples:
        """What the worker wrote, without a copy; the array keeps the memory alive."""
        if hasattr(fcntl, "F_ADD_SEALS"):
            # A worker that was taken over could shrink the file under us, and reading it would kill this process.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        return np.frombuffer(mmap.mmap(self.fd, 0, access=mmap.ACCESS_COPY), dtype=np.float32)

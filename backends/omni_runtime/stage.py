"""The loop of a stage that answers over time: admission, cancellation, deadlines, control, one FINAL for each request.

``execute()`` hands a request to :meth:`StageLoop.submit` and returns. The loop, an asyncio one on a thread of its own,
runs the stage's handler for it: an async generator of chunks. A request that streams gets them as they come; one that
does not gets one response folded of them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from omni_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    OmniError,
    Overloaded,
    StageUnavailable,
    render,
)
from omni_runtime.folding import fold
from omni_runtime.kserve import Value
from omni_runtime.metrics import NullMetrics, StageMetrics
from omni_runtime.request import Request
from omni_runtime.slots import Slots

Handler = Callable[[Request], AsyncGenerator[Mapping[str, Value], None]]

log = logging.getLogger("omni.stage")

POLL_SECONDS = 0.02
# One question to the response sender costs some 50 µs of the loop; with many requests they are asked less often.
POLL_SHARE = 0.0005
FLUSH_SECONDS = 0.5
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    """Admission: how many requests run at once, how many may wait, and how long one may take, in seconds."""

    max_running: int = 64
    max_waiting: int = 256
    timeout: float = 600.0


def settle() -> None:
    """Set apart what was loaded: the collector then looks at requests alone, and so often enough that none piles up."""
    gc.collect()
    gc.freeze()


class StageLoop:
    """Owns every request of a stage from admission to its FINAL.

    Args:
        name: the Triton model.
        handler: an async generator function; what it yields are chunks of the answer.
        limits: admission.
        status: adds the stage's own facts to the answer of ``control: status``.
    """

    def __init__(
        self,
        name: str,
        handler: Handler,
        limits: Limits,
        *,
        metrics: StageMetrics | None = None,
        status: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self._handler = handler
        self._metrics = metrics or NullMetrics()
        self._status = status or dict
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._moved: dict[str, asyncio.Event] = {}
        self._running = 0
        self._done = 0
        self._opened = time.monotonic()
        self._closed = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"{name}-loop", daemon=True)
        self._thread.start()
        self._slots = Slots(limits.max_running)
        self._poller = asyncio.run_coroutine_threadsafe(self._poll(), self.loop)

    def submit(self, request: Request) -> None:
        """Take a request, or refuse it. Returns at once and never raises."""
        try:
            if request.has("control"):
                request.send(self._control(request), last=True)
                return
            with self._lock:
                if self._closed:
                    raise Overloaded("the stage is shutting down", stage=self.name, retry_after=1)
                waiting = len(self._requests) - self._running
                if len(self._requests) >= self.limits.max_running + self.limits.max_waiting:
                    self._metrics.refused()
                    raise Overloaded(
                        f"{self.name} has {self._running} requests running and {waiting} waiting",
                        stage=self.name,
                        retry_after=self._retry_after(waiting),
                    )
                self._requests[request.id] = request
                self._metrics.in_flight(len(self._requests))
            self.loop.call_soon_threadsafe(self._start, request)
        except OmniError as error:
            request.end(error)
        except Exception as error:
            log.exception("%s: submit failed", self.name)
            request.end(Internal(f"{type(error).__name__}: {error}", stage=self.name, request=request.label))

    def close(self) -> None:
        """End what runs as Cancelled, stop the loop and join its thread."""
        with self._lock:
            self._closed = True
        future = asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop)
        try:
            future.result(CLOSE_SECONDS)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_SECONDS)

    def status(self) -> dict[str, Any]:
        """What ``control: status`` tells of the stage as a whole."""
        with self._lock:
            running, total = self._running, len(self._requests)
        return {"pid": os.getpid(), "running": running, "waiting": total - running, **self._status()}

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _start(self, request: Request) -> None:
        self._tasks[request.id] = self.loop.create_task(self._run(request))

    async def _run(self, request: Request) -> None:
        running = False
        error: OmniError | None = None
        allowed = request.remaining(self.limits.timeout)
        try:
            async with asyncio.timeout(allowed):
                await self._slots.acquire(high=request.priority == "high")
                with self._lock:
                    running = True
                    self._running += 1
                self._metrics.waited(time.monotonic() - request.started)
                await self._deliver(request)
        except OmniError as caught:
            error = caught
            error.stage = error.stage or self.name
        except TimeoutError:
            error = DeadlineExceeded(f"not done within {allowed:.3g} s", stage=self.name)
        except asyncio.CancelledError:
            error = Cancelled("the request was cancelled", stage=self.name)
        except Exception as caught:
            log.exception("%s: request %s failed", self.name, request.root)
            error = Internal(f"{type(caught).__name__}: {caught}", stage=self.name)
        finally:
            if error is not None:
                error.request = error.request or request.root
                if isinstance(error, StageUnavailable | DeadlineExceeded):
                    log.warning("%s: request %s: %s", self.name, request.root, render(error))
            with self._lock:
                self._requests.pop(request.id, None)
                self._running -= running
                self._done += 1
                left = len(self._requests)
            self._tasks.pop(request.id, None)
            self._moved.pop(request.id, None)
            if running:
                self._slots.release()
            request.end(error)
            self._metrics.in_flight(left)
            if error is not None:
                self._metrics.failed(type(error).__name__)

    async def _deliver(self, request: Request) -> None:
        stream, sent = request.stream, 0
        chunks: list[Mapping[str, Value]] = []
        async with aclosing(self._handler(request)) as answer:
            async for chunk in answer:
                if not stream:
                    chunks.append(chunk)
                    continue
                request.send(chunk)
                sent += 1
                # Sending does not wait: give cancellation and the other requests their turn.
                await asyncio.sleep(0)
                if request.window:
                    await self._room(request, sent)
        if not stream:
            request.send(fold(chunks), last=True)

    async def _poll(self) -> None:
        flushed = 0.0
        while True:
            await asyncio.sleep(max(POLL_SECONDS, POLL_SHARE * len(self._tasks)))
            if time.monotonic() - flushed > FLUSH_SECONDS:
                flushed = time.monotonic()
                self._metrics.flush()
            for key, task in list(self._tasks.items()):
                request = self._requests.get(key)
                if request is not None and not request.ended and request.transport.cancelled():
                    self._metrics.cancelled()
                    self._cancel(task)

    async def _shut_down(self) -> None:
        self._poller.cancel()
        await asyncio.sleep(0)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _control(self, request: Request) -> dict[str, Value]:
        verb = request.text("control")
        if verb not in ("stop", "status", "ack"):
            raise InvalidRequest(f"control must be stop or status, not {verb!r}", param="control", stage=self.name)
        wanted = request.text("control_id", "")
        if verb == "ack":
            return self._ack(wanted, request)
        if not wanted and verb == "status":
            return {"status": json.dumps(self.status())}
        with self._lock:
            found = [each for each in self._requests.values() if wanted and wanted in (each.label, each.id)]
        if not found:
            raise NotFound(f"no request {wanted!r} is running", param="control_id", stage=self.name)
        if len(found) > 1:
            raise InvalidRequest(f"{len(found)} requests are called {wanted!r}", param="control_id", stage=self.name)
        if verb == "stop":
            self.loop.call_soon_threadsafe(self._stop, found[0].id)
            return {"status": json.dumps({"state": "stopping", "pid": os.getpid()})}
        return {"status": json.dumps({"state": "running", "pid": os.getpid(), **found[0].progress})}

    def _ack(self, wanted: str, request: Request) -> dict[str, Value]:
        """A consumer tells how many chunks it has taken; the request may have ended meanwhile."""
        with self._lock:
            found = [each for each in self._requests.values() if wanted and each.label == wanted]
        for each in found:
            each.taken = max(each.taken, int(request.hints.get("omni_taken", 0)))
            if event := self._moved.get(each.id):
                self.loop.call_soon_threadsafe(event.set)
        return {"status": json.dumps({"state": "running" if found else "ended", "pid": os.getpid()})}

    async def _room(self, request: Request, sent: int) -> None:
        """Wait until the consumer of a stream is less than its window behind: what it has not taken is kept nowhere."""
        event = self._moved.setdefault(request.id, asyncio.Event())
        while sent - request.taken >= request.window:
            event.clear()
            if sent - request.taken >= request.window:
                await event.wait()

    def _stop(self, key: str) -> None:
        if task := self._tasks.get(key):
            self._cancel(task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        # A task that is cancelled before its first step never runs, and so would never send its FINAL.
        self.loop.call_soon(task.cancel)

    def _retry_after(self, waiting: int) -> float:
        """Seconds until the queue has likely moved on, by the rate at which this stage has finished requests."""
        rate = self._done / max(1e-3, time.monotonic() - self._opened)
        return round(min(60.0, max(1.0, waiting / rate if rate else 1.0)), 1)

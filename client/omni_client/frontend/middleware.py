"""What surrounds every route, outermost first: Observe, (CORS,) Admit, Authenticate, Attend."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Container, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_client.frontend.context import Context
from omni_client.frontend.errors import ApiError
from omni_client.frontend.metrics import Metrics

_LINGER = 2.0  # seconds
# Always answered: a probe must not need a key or a free place.
OPEN = ("/health", "/health/live", "/health/ready")


class Observe:
    """Gives a request its id, turns what nobody caught into an error body, and writes the log and the metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = Context.enter(scope)
        status = sent = 0
        first = None
        complete = False

        async def observed(message: Message) -> None:
            nonlocal status, sent, first, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = context.request_id
            elif message["type"] == "http.response.body":
                if first is None:
                    first = time.perf_counter() - context.started
                sent += len(message.get("body", b""))
                complete = complete or not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, observed)
        except Exception as error:
            failure = context.fail(error)
            if not status:
                await failure.response()(scope, receive, observed)
        finally:
            self._record(scope, context, status, sent, first, complete)

    def _record(
        self, scope: Scope, context: Context, status: int, sent: int, first: float | None, complete: bool
    ) -> None:
        seconds = time.perf_counter() - context.started
        # The route's template, and only models that exist: labels stay few.
        route = getattr(scope.get("route"), "path", "none")
        model = str(context.fields.get("model", ""))
        status = status or 499  # the client left before there was an answer
        if not complete and "error" not in context.fields:
            self.metrics.cancellations.labels(route).inc()
        if context.fields.get("code") == "deadline_exceeded":
            self.metrics.deadlines.labels(route, context.fields.get("stage", "")).inc()
        self.metrics.requests.labels(route, model, str(status)).inc()
        self.metrics.seconds.labels(route, model).observe(seconds)
        self.metrics.bytes.labels(route).inc(sent)
        if first is not None:
            self.metrics.first_byte.labels(route, model).observe(first)
        context.log(
            logging.INFO, "request", method=scope["method"], path=scope["path"], status=status, complete=complete,
            milliseconds=round(1000 * seconds, 1), first_byte_ms=None if first is None else round(1000 * first, 1),
            bytes=sent,
        )  # fmt: skip


class Admit:
    """At most `limit` requests at once; the others are told to come back. Those of each of `routes` are counted."""

    def __init__(self, app: ASGIApp, limit: int, metrics: Metrics, routes: Container[str]) -> None:
        self.app, self.limit, self.metrics, self.routes, self.running = app, limit, metrics, routes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        if self.running >= self.limit:
            busy = ApiError(429, f"{self.limit} requests are being answered: try again", code="overloaded")
            await busy.response()(scope, receive, send)
            return
        self.running += 1
        in_flight = self.metrics.in_flight.labels(scope["path"] if scope["path"] in self.routes else "other")
        in_flight.inc()
        try:
            await self.app(scope, receive, send)
        finally:
            self.running -= 1
            in_flight.dec()


class Authenticate:
    """Wants `Authorization: Bearer KEY` with one of the keys, compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._allowed(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        refusal = ApiError(
            401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
        await refusal.response()(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # All are compared, so that the time tells nothing about which one was near.
        matches = [hmac.compare_digest(key.strip().encode(), known) for known in self.keys]
        return scheme.lower() == "bearer" and any(matches)


class Attend:
    """Reads the body, up to a limit, then runs the route until its end or until the client is gone.

    A client that leaves cancels the route's task, and with it the calls to Triton, whether or not it streams. All
    bodies together may hold `total` bytes.
    """

    def __init__(self, app: ASGIApp, limit: int, total: int, timeout: float) -> None:
        self.app, self.limit, self.total, self.timeout, self.held = app, limit, total, timeout, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []
        try:
            try:
                complete = await self._read(scope, receive, parts)
            except ApiError as error:
                await self._refuse(error, receive, send)
                return
            if complete:
                await self._run(scope, receive, send, b"".join(parts))
        finally:
            self.held -= sum(map(len, parts))

    async def _run(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        gone = asyncio.Event()
        waiting = [body]

        async def replay() -> Message:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        route = asyncio.ensure_future(self.app(scope, replay, send))
        watcher = asyncio.create_task(watch())
        try:
            await asyncio.wait({route, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if route.done():
                route.result()
        finally:
            watcher.cancel()
            route.cancel()
            await asyncio.gather(route, watcher, return_exceptions=True)

    async def _refuse(self, error: ApiError, receive: Receive, send: Send) -> None:
        """Answers before the body's end, and reads on for a while: closing at once would reset the connection, and the
        client, still sending, would never see the answer."""
        response = error.response()
        await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if error.status == 408 else _LINGER):
                message = await receive()
                while message["type"] == "http.request" and message.get("more_body", False):
                    message = await receive()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self, scope: Scope, receive: Receive, parts: list[bytes]) -> bool:
        """The body into `parts`; False when the client left before its end. Raises ApiError 413, 429, 408."""
        # Closing is the one way to stop a client that is still sending.
        closing = {"connection": "close"}
        large = ApiError(413, f"the body is larger than {self.limit} bytes", code="body_too_large", headers=closing)
        stated = Headers(scope=scope).get("content-length", "0")
        if stated.isdigit() and int(stated) > self.limit:
            raise large
        size = 0
        try:
            async with asyncio.timeout(self.timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self.limit:
                        raise large
                    if self.held + len(part) > self.total:
                        full = "the bodies of other requests fill the memory set aside for them: try again"
                        raise ApiError(429, full, code="overloaded", headers=closing)
                    self.held += len(part)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self.timeout:g} s", code="request_timeout", headers=closing
            ) from None

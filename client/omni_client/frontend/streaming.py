"""Answers that are sent while they are made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_client.frontend.context import Context

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class Truncated(Exception):
    """The body must end in the air: the chunked encoding is left open, so that the client sees a failure."""


class Stream(Response):
    """Sends chunks as they come, and closes their generator whatever happens to the client."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], media_type: str, headers: Mapping[str, str], write_timeout: float
    ) -> None:
        self.chunks = chunks
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.write_timeout = write_timeout
        # Without these a proxy may hold the stream back, or keep it.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for chunk in self.chunks:
                    if chunk:
                        async with asyncio.timeout(self.write_timeout):
                            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Truncated:
                return
            except TimeoutError:
                Context.of(Request(scope)).fields["error"] = f"the client read nothing for {self.write_timeout:g} s"
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def started(
    stream: AsyncGenerator[T, None], begun: Callable[[T], bool] = lambda item: True
) -> AsyncGenerator[T, None]:
    """The same stream, once an item with which the answer has `begun` is there: till then a failure has its status."""
    items: list[T] = []
    try:
        async for item in stream:
            items.append(item)
            if begun(item):
                break
    except BaseException:
        await stream.aclose()
        raise
    return _chain(items, stream)


async def _chain(items: Sequence[T], stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(stream):
        for item in items:
            yield item
        async for item in stream:
            yield item


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(k, item of stream k) as they come. The first failure ends all; closing this closes all."""
    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue(len(streams))

    async def pump(k: int, stream: AsyncGenerator[T, None]) -> None:
        failure = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((k, item, None))
        except Exception as error:
            failure = error
        await queue.put((k, None, failure))

    tasks = [asyncio.create_task(pump(k, stream)) for k, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            k, item, failure = await queue.get()
            if failure is not None:
                raise failure
            if item is None:
                running -= 1
            else:
                yield k, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

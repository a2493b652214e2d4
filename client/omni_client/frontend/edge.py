"""What the routes share: the connection, the catalog, the decoders, and how a pipeline is called for a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from omni_runtime import seeds
from omni_runtime.errors import OmniError
from omni_runtime.kserve import Connection, Outputs, Value
from starlette.requests import Request

from omni_client.audio import encode
from omni_client.decoding import DecoderPool, Limits
from omni_client.frontend.catalog import Catalog, Pipeline
from omni_client.frontend.context import Context
from omni_client.frontend.metrics import Metrics
from omni_client.frontend.settings import Settings


class Edge:
    """One per app; `start` and `close` run in the server's event loop."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.connection: Connection
        self.catalog: Catalog
        self.decoder: DecoderPool
        self.warming: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.connection = Connection(self.settings.triton, headers=self.settings.triton_headers)
        self.catalog = Catalog(self.connection, self.settings.aliases, self.settings.refresh)
        limits = Limits(max_seconds=self.settings.max_audio_seconds)
        self.decoder = DecoderPool(workers=self.settings.decoders, limits=limits)
        if self.settings.warm:
            self.warming = asyncio.create_task(self._warm())

    async def close(self) -> None:
        if self.warming is not None:
            self.warming.cancel()
            await asyncio.gather(self.warming, return_exceptions=True)
        await self.connection.close()
        await self.decoder.close()

    async def _warm(self) -> None:
        """The first requests need not pay for what every process pays once. What fails here is told to a request."""
        await asyncio.to_thread(encode, np.zeros(240, np.float32), 24_000, "mp3")
        await self.decoder.start()

    @staticmethod
    def of(request: Request) -> Edge:
        return cast(Edge, request.app.state.edge)

    async def pipeline(self, request: Request, model: str, task: str, logged: Mapping[str, Any]) -> Pipeline:
        """The pipeline that a body names, and a note of it for the log."""
        fields = Context.of(request).fields
        fields.update(logged)
        pipeline = await self.catalog.find(model, task)
        fields.update(model=pipeline.name, task=task)
        return pipeline

    async def call(
        self,
        request: Request,
        pipeline: Pipeline,
        inputs: Mapping[str, Value],
        params: Mapping[str, Any],
        outputs: Sequence[str],
        fields: Mapping[str, str],
        *,
        stream: bool,
        child: int | None = None,
    ) -> AsyncGenerator[Outputs, None]:
        """The pipeline's responses. Closing this generator cancels the call, and so the work in the server.

        `fields`: what the pipeline's inputs and params are called in the route's body, for errors that name one.
        """
        context = Context.of(request)
        responses = self.connection.stream(
            pipeline.name,
            {**inputs, "params": json.dumps(params), "stream": stream},
            outputs=[name for name in outputs if name in pipeline.outputs],
            request_id=context.request_id if child is None else f"{context.request_id}-{child}",
            timeout=self.settings.request_timeout,
            headers=context.trace,
        )
        try:
            async for response in responses:
                yield response
        except OmniError as error:
            rename(error, fields)
            raise
        finally:
            await responses.aclose()


def rename(error: OmniError, fields: Mapping[str, str]) -> None:
    """Call the field at fault as the route does, in `param` and where the message begins with it."""
    name = error.param or ""
    if name not in fields:
        return
    error.param = fields[name]
    if error.message.startswith((f"{name} ", f"{name}:")):
        error.message = fields[name] + error.message[len(name) :]


def drawn(seed: int | None, k: int = 0) -> int:
    """The seed of the k-th answer; drawn when the request brought none (0 is a seed)."""
    return ((seeds.draw() if seed is None else seed) + k) % seeds.SEED_LIMIT


async def in_thread(function: Any, *arguments: Any) -> Any:
    """Runs a codec off the event loop; a cancelled caller still waits for it, for its state has one user at a time."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise

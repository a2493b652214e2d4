"""What the routes share: the connection, the catalog, the decoders, and how a pipeline is called for a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from omni_runtime import seeds
from omni_runtime.errors import DeadlineExceeded, OmniError
from omni_runtime.kserve import Connection, Outputs, Value
from omni_runtime.pool import Servers
from starlette.requests import Request

from omni_client.audio import encode
from omni_client.decoding import DecoderPool, Limits
from omni_client.frontend.catalog import Catalog, Pipeline
from omni_client.frontend.context import Context
from omni_client.frontend.fields import Called
from omni_client.frontend.metrics import Metrics
from omni_client.frontend.pools import Pools
from omni_client.frontend.settings import Settings


class Edge:
    """One per app; `start` and `close` run in the server's event loop."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.servers: Servers
        self.connection: Connection
        self.pools: Pools
        self.catalog: Catalog
        self.decoder: DecoderPool
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.servers = Servers(self.settings.triton, headers=self.settings.triton_headers)
        self.connection = self.servers.at(self.servers.own)
        self.pools = Pools(self.servers, self.settings.request_timeout, self.metrics)
        self.catalog = Catalog(self.connection, self.pools, self.settings.aliases, self.settings.refresh)
        self.tasks.append(asyncio.create_task(self.catalog.run()))
        limits = Limits(max_seconds=self.settings.max_audio_seconds)
        self.decoder = DecoderPool(workers=self.settings.decoders, limits=limits)
        if self.settings.warm:
            self.tasks.append(asyncio.create_task(self._warm()))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.pools.close()
        await self.servers.close()
        await self.decoder.close()

    async def _warm(self) -> None:
        """The first requests need not pay for what every process pays once. What fails here is told to a request."""
        await asyncio.to_thread(encode, np.zeros(240, np.float32), 24_000, "mp3")
        await self.decoder.start()

    @staticmethod
    def of(request: Request) -> Edge:
        return cast(Edge, request.app.state.edge)

    async def pipeline(self, request: Request, body: Called, task: str, logged: Mapping[str, Any]) -> Pipeline:
        """The pipeline that a body names, and a note of it for the log. The caller's timeout begins."""
        context = Context.of(request)
        context.limit(body.timeout)
        context.priority = body.priority or "normal"
        context.fields.update(logged)
        pipeline = await self.catalog.find(body.model, task)
        context.fields.update(model=pipeline.name, task=task)
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
    ) -> AsyncGenerator[Outputs, None]:
        """The pipeline's responses. Closing this generator cancels the call, and so the work in the server.

        `fields`: what the pipeline's inputs and params are called in the route's body, for errors that name one.
        """
        context = Context.of(request)
        limit = context.left(self.settings.request_timeout)
        late = DeadlineExceeded(f"not done within {context.timeout or limit:g} s", stage=pipeline.name)
        if limit <= 0:
            raise late
        high = {"priority": "high"} if context.priority == "high" else {}
        responses = self.pools.of(pipeline.name).stream(
            context,
            {**inputs, "params": json.dumps({**params, **high}), "stream": stream},
            outputs=[name for name in outputs if name in pipeline.outputs],
            # Triton's own parameter, in microseconds: the pipeline hands what is left of it on to its stages.
            parameters={"timeout": max(1, round(1e6 * limit))},
        )
        try:
            async for response in responses:
                yield response
        except DeadlineExceeded as error:
            # The pipeline has a limit of its own, too.
            raise late if error.stage == pipeline.name and context.late else error from None
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

"""Base of a pipeline's ``model.py``: a decoupled Python model that chains stages.

A pipeline is one async generator, :meth:`Pipeline.run`, which yields the chunks of its answer; everything that every
pipeline must do (admission, cancellation, deadlines, one FINAL, folding for callers that do not stream) is the loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from omni_runtime import triton
from omni_runtime.config import StageConfig
from omni_runtime.kserve import Value
from omni_runtime.metrics import TritonMetrics
from omni_runtime.pool import Pool, Servers
from omni_runtime.request import Request
from omni_runtime.stage import StageLoop, settle
from omni_runtime.stubs import own_address


class Pipeline:
    """Triton's ``TritonPythonModel`` for a script; ``pools`` holds one pool for each name in its ``stages``."""

    config: StageConfig
    pools: dict[str, Pool]
    metrics: TritonMetrics

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        self.config = StageConfig.from_triton(args)
        self.metrics = TritonMetrics(pb_utils, self.config.name)
        self.prepare()
        self._loop = StageLoop(self.config.name, self.run, self.config.limits, metrics=self.metrics)
        # A channel belongs to the loop that it was opened in.
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop.loop).result()
        settle()

    def prepare(self) -> None:
        """Load what the script itself needs, once."""

    def run(self, request: Request) -> AsyncGenerator[Mapping[str, Value], None]:
        """The answer to ``request``, in chunks; at least one."""
        raise NotImplementedError

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._loop.submit(triton.decoupled_request(self._pb, request))

    def finalize(self) -> None:
        asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop.loop).result(5)
        self._loop.close()

    async def _connect(self) -> None:
        self._servers = Servers(own_address())
        self.pools = {
            name: Pool(name, self._servers, changed=partial(self.metrics.pool, name))
            for name in self.config.names("stages")
        }

    async def _disconnect(self) -> None:
        for pool in self.pools.values():
            pool.close()
        await self._servers.close()

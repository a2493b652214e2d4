"""Through which replicas pipelines are called, and which of the models below them live."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress
from functools import partial

from omni_runtime.errors import OmniError, StageUnavailable
from omni_runtime.pool import Pool, Servers

from omni_client.frontend.metrics import Metrics

# A dead process is seen at once where it can be watched; a model on another host is asked this often.
LOOK_SECONDS = 5.0


class Watched(Pool):
    """A pool that knows of its replicas' death although nobody calls them."""

    async def open(self) -> None:
        """As :meth:`Pool.open`; StageUnavailable while the server does not tell what replicas there are."""
        await super().open()
        if not self._replicas[0].config:
            self.close()
            self._replicas = []
            raise StageUnavailable(f"{self.stage} cannot be reached", stage=self.stage)

    async def look(self) -> None:
        """Ask every replica whether it is there; one that is only slow to answer is left alone."""
        for replica in self._replicas:
            with suppress(OmniError):
                # One whose server was down when the pool was opened.
                replica.config = replica.config or await replica.connection.config(replica.name)
                if replica.live:
                    try:
                        await replica.status()
                    except StageUnavailable as error:
                        replica.evict(error.message)

    def works(self, loaded: Container[str]) -> bool:
        """Whether a replica lives and, as far as it is on our own server, is among those `loaded` there."""
        if not self._replicas:
            return self.stage in loaded
        own = self._servers.at(self._servers.own)
        return any(each.live and (each.connection is not own or each.name in loaded) for each in self._replicas)


class Pools:
    """One pool for each model, made when it is first asked for; each is watched by a task."""

    def __init__(self, servers: Servers, timeout: float, metrics: Metrics) -> None:
        self._servers, self._timeout, self._metrics = servers, timeout, metrics
        self._pools: dict[str, Watched] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def of(self, model: str) -> Watched:
        if model not in self._pools:
            changed = partial(self._metrics.pool, model)
            pool = self._pools[model] = Watched(model, self._servers, timeout=self._timeout, changed=changed)
            self._tasks.append(asyncio.create_task(self._watch(pool)))
        return self._pools[model]

    def works(self, model: str, loaded: Container[str]) -> bool:
        """Whether a call of `model` would find a replica, as far as is known."""
        return self.of(model).works(loaded)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self._pools.values():
            pool.close()

    async def _watch(self, pool: Watched) -> None:
        while True:
            with suppress(OmniError):
                await pool.open()
                await pool.look()
            await asyncio.sleep(LOOK_SECONDS)

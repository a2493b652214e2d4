"""How a script, or the frontend, calls a model: through the pool of its replicas, over gRPC.

One stream per child call on a channel shared by server, so that cancel, deadline and traceparent belong to the
request: a handler's task that is cancelled cancels its child calls. A call goes to the live replica with the least
outstanding work and is bound to it; when that dies, the call ends at once. One that has delivered nothing is made once
more, elsewhere.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from omni_runtime.errors import OmniError, Overloaded, StageUnavailable
from omni_runtime.kserve import Connection, Outputs, Parameter, Value, target
from omni_runtime.replica import Replica, replica_names

# Chunks that may be on their way to a consumer before it has taken one: bounds what waits in the server.
WINDOW = 16


class Parent(Protocol):
    """The request for which a call is made."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def priority(self) -> str: ...

    @property
    def root(self) -> str: ...

    def remaining(self, default: float) -> float: ...


class Servers:
    """The channels of one process, one for each server that it calls."""

    def __init__(self, own: str, *, headers: Mapping[str, str] | None = None) -> None:
        self.own = target(own)
        self._headers = headers
        self._connections: dict[str, Connection] = {}

    def at(self, address: str) -> Connection:
        if address not in self._connections:
            headers = self._headers if address == self.own else None
            self._connections[address] = Connection(address, headers=headers)
        return self._connections[address]

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()


class Pool:
    """The replicas of a model: itself, and those that its configuration lists in ``replicas``.

    Args:
        name: the Triton model on the process's own server.
        servers: the process's channels.
        timeout: seconds that one call may take; the request's own timeout counts too.
        changed: called with (live, all, evicted) when a replica is taken out of use or comes back.
    """

    def __init__(
        self,
        name: str,
        servers: Servers,
        *,
        timeout: float = 120.0,
        changed: Callable[[int, int, bool], None] | None = None,
    ) -> None:
        self.stage = name
        self._servers = servers
        self._timeout = timeout
        self._report = changed or (lambda live, size, evicted: None)
        self._opening = asyncio.Lock()
        self._replicas: list[Replica] = []

    @property
    def live(self) -> bool:
        """Whether a call would find a replica; True until the first one has looked."""
        return not self._replicas or any(replica.live for replica in self._replicas)

    async def open(self) -> None:
        """Read from the server which replicas there are; done by the first call."""
        async with self._opening:
            if self._replicas:
                return
            first = Replica(self.stage, self._servers.at(self._servers.own), self._changed)
            await first.open()
            others = []
            for listed in replica_names(first.config):
                address, _, name = listed.removeprefix("grpc://").rpartition("/")
                others.append(Replica(name, self._servers.at(target(address or self._servers.own)), self._changed))
            await asyncio.gather(*(other.open() for other in others))
            self._replicas = [first, *others]
            self._report(sum(each.live for each in self._replicas), len(self._replicas), False)

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()

    async def infer(
        self, parent: Parent, inputs: Mapping[str, Value], *, outputs: Sequence[str] | None = None
    ) -> Outputs:
        """One answer of a model that is not decoupled."""

        async def call(replica: Replica) -> Outputs:
            return await replica.during(
                replica.connection.infer(
                    replica.name,
                    inputs,
                    outputs=outputs,
                    parameters=_hints(parent),
                    request_id=uuid.uuid4().hex,
                    timeout=parent.remaining(self._timeout),
                    headers=parent.headers,
                )
            )

        replica = await self._choose()
        try:
            return await _counted(replica, call)
        except (StageUnavailable, Overloaded) as error:
            other = self._elsewhere(replica, error)
        except OmniError as error:
            raise _named(error, replica) from None
        try:
            return await _counted(other, call)
        except OmniError as error:
            raise _named(error, other) from None

    async def stream(
        self,
        parent: Parent,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AsyncGenerator[Outputs, None]:
        """The answers of a decoupled model, another pipeline say, streamed."""
        replica = await self._choose()
        delivered = False
        try:
            async with aclosing(self._stream(replica, parent, inputs, outputs, parameters)) as answers:
                async for answer in answers:
                    delivered = True
                    yield answer
            return
        except (StageUnavailable, Overloaded) as error:
            if delivered:
                raise _named(error, replica) from None
            other = self._elsewhere(replica, error)
        except OmniError as error:
            raise _named(error, replica) from None
        try:
            async with aclosing(self._stream(other, parent, inputs, outputs, parameters)) as answers:
                async for answer in answers:
                    yield answer
        except OmniError as error:
            raise _named(error, other) from None

    async def _stream(
        self,
        replica: Replica,
        parent: Parent,
        inputs: Mapping[str, Value],
        outputs: Sequence[str] | None,
        parameters: Mapping[str, Parameter] | None,
    ) -> AsyncGenerator[Outputs, None]:
        calls = replica.connection.stream(
            replica.name,
            {"stream": True, **inputs},
            outputs=outputs,
            parameters={**_hints(parent), **(parameters or {})},
            request_id=uuid.uuid4().hex,
            timeout=parent.remaining(self._timeout),
            headers=parent.headers,
            window=WINDOW,
        )
        replica.begin()
        failed: OmniError | None = None
        lost = False
        try:
            while True:
                try:
                    answer = await replica.during(anext(calls))
                except StopAsyncIteration:
                    return
                yield answer
        except OmniError as error:
            failed = error
            lost = not replica.live
            raise
        finally:
            replica.end(failed)
            if not lost:
                await calls.aclose()

    async def _choose(self) -> Replica:
        if not self._replicas:
            await self.open()
        return self._least([each for each in self._replicas if each.live])

    def _elsewhere(self, tried: Replica, error: OmniError) -> Replica:
        """Another replica for a call that ``tried`` did not begin or lost; the error itself where there is none.

        What a replica reports of a stage that it calls itself would be no different elsewhere.
        """
        others = [each for each in self._replicas if each.live and each is not tried]
        own = error.stage in (None, tried.name)
        if not others or not own:
            raise _named(error, tried) from None
        return self._least(others)

    def _least(self, replicas: list[Replica]) -> Replica:
        if not replicas:
            raise StageUnavailable(f"no replica of {self.stage} is alive", stage=self.stage)
        return min(replicas, key=lambda each: each.outstanding)

    def _changed(self, replica: Replica) -> None:
        self._report(sum(each.live for each in self._replicas), len(self._replicas), not replica.live)


async def _counted(replica: Replica, call: Callable[[Replica], object]) -> Outputs:
    replica.begin()
    failed: OmniError | None = None
    try:
        return await call(replica)  # type: ignore[misc, no-any-return]
    except OmniError as error:
        failed = error
        raise
    finally:
        replica.end(failed)


def _hints(parent: Parent) -> dict[str, Parameter]:
    return {"omni_request": parent.root, **({"omni_priority": "high"} if parent.priority == "high" else {})}


def _named(error: OmniError, replica: Replica) -> OmniError:
    error.stage = error.stage or replica.name
    error.request = None
    return error

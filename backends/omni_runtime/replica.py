"""One replica of a stage: where it is, whether it lives, and the calls that depend on it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from omni_runtime import stubs
from omni_runtime.errors import DeadlineExceeded, OmniError, StageUnavailable
from omni_runtime.kserve import Connection, text
from omni_runtime.probe import probe
from omni_runtime.reload import Backoff, reload, supervised

log = logging.getLogger("omni.pool")

Answer = TypeVar("Answer")

STATUS_SECONDS = 3.0
PROBE_SECONDS = 10.0
# A replica that somebody else reloads is asked this often whether it is back.
RETRY_SECONDS = 0.25
# How often it is looked whether the processes of an earlier load are gone: half a minute in all.
FOLLOW_TRIES = 120
# Without a process to watch (another host), a replica with calls is asked this often whether it still answers.
HEARTBEAT_SECONDS = 1.0


class Replica:
    """A model on a server. ``live`` is this process's own view; what it takes out of use it brings back by itself.

    Args:
        name: the Triton model.
        connection: the channel to its server, shared with the server's other models.
        changed: called when it is taken out of use or comes back.
    """

    def __init__(self, name: str, connection: Connection, changed: Callable[[Replica], None] | None = None) -> None:
        self.name = name
        self.connection = connection
        self.live = True
        self.outstanding = 0
        self.config: Mapping[str, Any] = {}
        self._changed = changed or (lambda _: None)
        self._death = asyncio.get_running_loop().create_future()
        self._held: set[asyncio.Future[Any]] = set()
        self._watch: stubs.Watch | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._backoff = Backoff()
        self._opened = False
        self._asking = False
        self._server = 0

    @property
    def address(self) -> str:
        return f"grpc://{self.connection.url}/{self.name}"

    async def open(self) -> None:
        """Find its processes and watch them; where they cannot be seen, ask it from time to time while it has calls."""
        if self._opened:
            return
        self._opened = True
        with suppress(OmniError):
            self.config = await self.connection.config(self.name)
        await self._find()

    async def during(self, work: Awaitable[Answer]) -> Answer:
        """``work``, which needs this replica: ends with StageUnavailable the moment it is gone.

        What waits for a dead process is then left waiting, and is cancelled only when the replica is back: a request
        that is cancelled in a dead stub stays in the server for ever, and its model cannot be unloaded.
        """
        task = asyncio.ensure_future(work)
        try:
            if self.live:
                await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        except asyncio.CancelledError:
            await _cancelled(task)
            raise
        self._held.add(task)
        raise self.gone()

    def begin(self) -> None:
        self.outstanding += 1
        if self._watch is None:
            self._spawn(self._heartbeat)

    def end(self, error: BaseException | None = None) -> None:
        """A call has ended. An error that came from Triton itself, or from the way there, is this replica's."""
        self.outstanding -= 1
        if isinstance(error, StageUnavailable) and error.stage is None:
            self.evict(error.message)
        elif isinstance(error, DeadlineExceeded) and error.stage is None and not self._asking:
            self._spawn(self._suspect)

    def gone(self) -> StageUnavailable:
        return StageUnavailable(f"{self.name} has died", stage=self.name)

    def evict(self, reason: str) -> None:
        """Take it out of use: its calls end now, and it comes back when it has answered a real request."""
        if not self.live:
            return
        self.live = False
        log.warning("%s is out of use: %s", self.address, reason)
        self._changed(self)
        self._death.set_result(None)
        self._unwatch()
        self._spawn(self._revive)

    def close(self) -> None:
        self._unwatch()
        self._release()
        for task in self._tasks:
            task.cancel()

    def _release(self) -> None:
        for task in self._held:
            task.add_done_callback(_forget)
            task.cancel()
        self._held.clear()

    async def _find(self) -> None:
        self._unwatch()
        pids = await self._pids()
        if pids:
            self._watch = stubs.Watch(pids, self._ended)

    def _ended(self) -> None:
        """One of its processes is gone: killed, or replaced when somebody loaded the model anew."""
        watched = set(self._watch.pids) if self._watch is not None else set()
        if set(stubs.stub_pids(self._server, self.name)) - watched:
            self._spawn(self._follow)
        else:
            self.evict("its process has ended")

    async def _follow(self) -> None:
        """Watch the new processes, once the old ones are gone."""
        before = set(self._watch.pids) if self._watch is not None else set()
        for _ in range(FOLLOW_TRIES):
            await asyncio.sleep(RETRY_SECONDS)
            if not before & set(stubs.stub_pids(self._server, self.name)):
                break
        await self._find()

    async def _pids(self) -> list[int]:
        """Its processes if they are to be seen from here, that is on this host and of a server of this name."""
        try:
            status = await self.status()
        except OmniError:
            return []
        self._server = stubs.server_of(int(status.get("pid", 0))) or 0
        return stubs.stub_pids(self._server, self.name) if self._server else []

    async def status(self) -> dict[str, Any]:
        """What the model says of itself."""
        inputs = {"control": "status"}
        if self.config.get("model_transaction_policy", {}).get("decoupled"):
            answers = [
                answer
                async for answer in self.connection.stream(
                    self.name, inputs, outputs=["status"], timeout=STATUS_SECONDS
                )
            ]
            return dict(json.loads(text(answers[0], "status")))
        answer = await self.connection.infer(self.name, inputs, outputs=["status"], timeout=STATUS_SECONDS)
        return dict(json.loads(text(answer, "status")))

    async def _heartbeat(self) -> None:
        if self._asking:
            return
        self._asking = True
        try:
            while self.live and self.outstanding and self._watch is None:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                try:
                    await self.status()
                except (DeadlineExceeded, StageUnavailable) as error:
                    self.evict(f"it answers no more: {error}")
        finally:
            self._asking = False

    async def _suspect(self) -> None:
        """A call ran out of time: a wedged process, or just a slow one? A probe tells."""
        self._asking = True
        try:
            await probe(self.connection, self.name, self.config, PROBE_SECONDS)
        except (DeadlineExceeded, StageUnavailable) as error:
            if error.stage in (None, self.name):
                self.evict(f"it does not answer a probe: {error}")
        finally:
            self._asking = False

    async def _revive(self) -> None:
        while True:
            await asyncio.sleep(self._backoff.next() if self._ours() else RETRY_SECONDS)
            try:
                if self._ours():
                    await self._reload()
                elif not self.config:
                    self.config = await self.connection.config(self.name)
                await probe(self.connection, self.name, self.config, PROBE_SECONDS)
            except (OmniError, TimeoutError) as error:
                if isinstance(error, OmniError) and error.stage not in (None, self.name):
                    break  # it works itself; what it calls does not
                log.info("%s is not back yet: %s", self.address, error)
                await asyncio.sleep(0)
                continue
            break
        self._backoff.serves()
        await self._find()
        self._release()
        self._death = asyncio.get_running_loop().create_future()
        self.live = True
        log.warning("%s is back", self.address)
        self._changed(self)

    def _ours(self) -> bool:
        """Whether reloading it is ours to do: on the server that this process is a stub of, with no launcher there."""
        server = stubs.own_server()
        return server is not None and not supervised() and stubs.serves_at(server, self.connection.url)

    async def _reload(self) -> None:
        server = stubs.own_server()
        if server is not None:
            stubs.kill(stubs.stub_pids(server, self.name))
        await reload(self.connection, self.name)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _spawn(self, work: Callable[[], Any]) -> None:
        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel ``task`` and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


def replica_names(config: Mapping[str, Any]) -> list[str]:
    """The further replicas that a stage's configuration lists: names on its own server, or grpc://HOST:PORT/NAME."""
    listed = str(config.get("parameters", {}).get("replicas", {}).get("string_value", ""))
    return [part.strip() for part in listed.split(",") if part.strip()]

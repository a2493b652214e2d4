"""The watch over one loaded model: its processes by pidfd, its answers by probes; what is broken is loaded again."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from omni_runtime.errors import DeadlineExceeded, OmniError, StageUnavailable
from omni_runtime.kserve import Connection, parameter, text
from omni_runtime.probe import probe
from omni_runtime.reload import Backoff, reload
from omni_runtime.stage import Limits
from omni_runtime.stubs import Watch, kill, stub_pids

from omni_client.launch.counters import Counters
from omni_client.launch.processes import stopped
from omni_client.launch.progress import Display
from omni_client.launch.races import within

LOAD_SECONDS = 900.0
# What a model's other processes get to finish their requests before it is loaded again.
GRACE_SECONDS = 30.0
# The first answer after a load may have to warm things up.
FIRST_PROBE_SECONDS = 60.0
SETTLE_SECONDS = 0.2
STATUS_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Probing:
    """`every` seconds (0: never) each model is asked, and has `timeout` seconds to answer."""

    every: float = 10.0
    timeout: float = 20.0


class Guards:
    """Watches `models` of the tritonserver with pid `server` while :meth:`run` runs."""

    def __init__(
        self,
        models: Iterable[str],
        server: int,
        connection: Connection,
        probing: Probing,
        counters: Counters,
        display: Display,
    ) -> None:
        self.server, self.connection = server, connection
        self.probing, self.counters, self.display = probing, counters, display
        self.by_name = {name: Guard(name, self) for name in models}

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as group:
            for guard in self.by_name.values():
                group.create_task(guard.run())


class Guard:
    """The watch over the model `name`."""

    def __init__(self, name: str, guards: Guards) -> None:
        self.name = name
        self.working = True
        self._guards = guards
        self._connection = guards.connection
        self._backoff = Backoff()
        self._config: Mapping[str, Any] = {}
        self._pids: tuple[int, ...] = ()
        self._complaint = ""

    async def run(self) -> None:
        while True:
            try:
                cause, why = await self._broken()
                self.working = False
                self._say(f"{why}; loading it again")
                await self._bring_back(cause)
                self.working = True
            except (OmniError, TimeoutError, OSError):  # the server is going, which is for its own watch to see
                await asyncio.sleep(1.0)
            except Exception:
                # A mistake in here must not end what it watches over.
                self._say(traceback.format_exc())
                await asyncio.sleep(1.0)

    async def answers(self) -> bool:
        """Whether the model works, asked now."""
        return self.working and await self._fault(self._guards.probing.timeout) is None

    # --- finding out

    async def _broken(self) -> tuple[str, str]:
        """Return, once the model is broken, whether it `ended` or is `wedged`, and in words why."""
        while True:
            try:
                self._config = await self._connection.config(self.name)
            except OmniError as error:
                if not await self._connection.live():
                    raise
                return "ended", f"it is not loaded ({error})"
            self.working = True
            self._pids = tuple(stub_pids(self._guards.server, self.name))
            # One may have died before it could be watched.
            if len(self._pids) < instances(self._config):
                return "ended", "a process of it is gone"
            ended = asyncio.Event()
            watch = Watch(self._pids, ended.set)
            try:
                wedged = await self._wedged(ended)
            finally:
                watch.close()
            if wedged:
                kill(self._now())
                return "wedged", wedged
            if not await self._replaced():
                return "ended", "its process ended"

    async def _wedged(self, ended: asyncio.Event) -> str | None:
        """Why the model does not work although its processes live; None as soon as one of them has `ended`."""
        every, timeout = self._guards.probing.every, self._guards.probing.timeout
        late = halted = 0
        served = await self._served()
        while not await within(ended.wait(), every or None):
            halted = halted + 1 if stopped(self._pids) else 0
            before, served = served, await self._served()
            if before and served and before[0] < served[0] and before[1] == served[1] and not halted:
                late = 0
                continue  # it has answered others, all of them: no need to ask
            asking = asyncio.ensure_future(self._fault(timeout))
            try:
                if await within(ended.wait(), None, asking):
                    return None
                fault = asking.result()
            finally:
                asking.cancel()
            served = await self._served()
            late = late + 1 if fault else 0
            if late >= 2 or (stopped(self._pids) and (late or halted >= 2)):
                return f"it does not answer ({fault or 'a process of it is stopped'})"
        return None

    async def _fault(self, seconds: float) -> str | None:
        """Send the model its probe; what of its own keeps it from answering, None if nothing does.

        A model that answers with an error answers, a busy one works, and a pipeline is not to blame for what it calls.
        """
        served = await self._served()
        try:
            await probe(self._connection, self.name, self._config, seconds)
        except (DeadlineExceeded, StageUnavailable) as error:
            if error.stage not in (None, self.name) or not await self._connection.live():
                return None
            if isinstance(error, DeadlineExceeded) and await self._busy(served):
                return None
            guards = self._guards.by_name
            below = [guards[name] for name in listed(self._config, "stages") if name in guards]
            # A call that waits for a child that hangs looks like a pipeline that hangs.
            if not all(await asyncio.gather(*(guard.answers() for guard in below))):
                return None
            return str(error)
        except OmniError as error:
            if str(error) != self._complaint:
                self._say(f"it answers its probe with an error: {error}")
            self._complaint = str(error)
            return None
        self._complaint = ""
        return None

    async def _served(self) -> tuple[int, int] | None:
        """How often the model succeeded and failed; None where Triton cannot tell.

        For a decoupled model it counts a request as a success once the model has taken it, answered or not.
        """
        if self._config.get("model_transaction_policy", {}).get("decoupled"):
            return None
        with suppress(OmniError):
            found = (await self._connection.statistics(self.name)).get("inference_stats", {})
            success, fail = (int(found.get(name, {}).get("count", 0)) for name in ("success", "fail"))
            return success, fail
        return None

    async def _busy(self, before: tuple[int, int] | None) -> bool:
        """Whether a probe that was not answered in time only had to wait: others were answered meanwhile, or as many
        run as may."""
        if before is not None:
            after = await self._served()
            return after is not None and after[0] > before[0]
        try:
            async with aclosing(
                self._connection.stream(self.name, {"control": "status"}, outputs=["status"], timeout=STATUS_SECONDS)
            ) as answers:
                said = [text(answer, "status") async for answer in answers]  # to its end, so that nothing is cancelled
            status = json.loads(said[0])
            allowed = int(parameter(self._config, "max_running") or Limits.max_running)
            return bool(status["waiting"] > 0 and status["running"] >= allowed)
        except (OmniError, ValueError, LookupError):
            return False

    async def _replaced(self) -> bool:
        """After a process ended: True if somebody unloaded the model, or loaded it anew; that is theirs to do."""
        told = False
        while True:
            rows = [row for row in await self._connection.index() if row["name"] == self.name]
            states = {row.get("state", "") for row in rows}
            if "READY" in states:
                pids = set(self._now())
                if not pids - set(self._pids):
                    return False
                if not pids & set(self._pids):
                    return True
                await asyncio.sleep(SETTLE_SECONDS)  # the old ones are going
                continue
            unloaded = any(row.get("reason") == "unloaded" for row in rows)
            if not unloaded and not states & {"LOADING", "UNLOADING"}:
                return False
            if unloaded and not told:
                self._say("it was unloaded, and is left so until somebody loads it again")
                told = True
            self.working = False
            await asyncio.sleep(SETTLE_SECONDS)

    # --- bringing back

    async def _bring_back(self, cause: str) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._backoff.next())
            try:
                self._guards.counters.reload(self.name, cause)
                await self._reload()
                if fault := await self._first_answer():
                    raise StageUnavailable(fault)
            except (OmniError, TimeoutError) as error:
                if not await self._connection.live():
                    raise
                self._say(f"loaded again in vain: {error or type(error).__name__}")
                kill(self._now())
                continue
            self._backoff.serves()
            self._say(f"works again after {time.monotonic() - began:.1f} s")
            return

    async def _reload(self) -> None:
        old = set(self._now())
        kill(stopped(old))  # it would not let itself be unloaded
        limit = time.monotonic() + GRACE_SECONDS
        work = asyncio.ensure_future(reload(self._connection, self.name, LOAD_SECONDS))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=SETTLE_SECONDS)
                now = set(self._now())
                # What a dead process had under way keeps the others of its load from ending, for ever. They go when
                # their successors start, so that nobody takes them for those.
                if now - old or time.monotonic() > limit:
                    kill(old & now)
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _first_answer(self) -> str | None:
        ended = asyncio.Event()
        self._config = await self._connection.config(self.name)
        watch = Watch(self._now(), ended.set)
        asking = asyncio.ensure_future(self._fault(max(FIRST_PROBE_SECONDS, self._guards.probing.timeout)))
        try:
            if await within(ended.wait(), None, asking):
                return "its process ended at once"
            return asking.result()
        finally:
            asking.cancel()
            watch.close()

    def _now(self) -> list[int]:
        return stub_pids(self._guards.server, self.name)

    def _say(self, line: str) -> None:
        self._guards.display.say(f"{self.name}: {line}")


def instances(config: Mapping[str, Any]) -> int:
    """How many Python processes run the model, as far as its configuration tells."""
    backend = str(config.get("backend", ""))
    if backend != "python" and not backend.startswith("omni_"):
        return 0
    groups = config.get("instance_group", [])
    return sum(int(group.get("count", 1)) * max(1, len(group.get("gpus", []))) for group in groups)


def listed(config: Mapping[str, Any], name: str) -> list[str]:
    """A parameter that is a list with commas."""
    return [item.strip() for item in parameter(config, name).split(",") if item.strip()]

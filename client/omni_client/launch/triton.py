"""One `tritonserver` process: its command, its start, its log and its end."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM

from omni_runtime.errors import Internal
from omni_runtime.kserve import Connection

from omni_client.launch import ports, processes
from omni_client.launch.log import tail
from omni_client.launch.shm import Prefix

LOOPBACK = "127.0.0.1"
# Whoever may load a model may run code; these read or change the machine rather than ask a model.
RESTRICTED = "model-repository,shared-memory,trace,logging"
KEY_HEADER = "omni-key"
KEY_VARIABLE = "OMNI_TRITON_KEY"
START_SECONDS = 60.0
PORT_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How `tritonserver` is started; ports of 0 are picked."""

    binary: Path
    backends: Path
    repositories: tuple[Path, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    key: str | None = None
    """Opens the restricted APIs; None makes one when `host` is not loopback."""
    drain_seconds: float = 30.0
    log_dir: Path = Path("out")
    arguments: tuple[str, ...] = ()
    """Further flags for `tritonserver`."""

    def wanted(self) -> dict[str, int]:
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


class TritonServer:
    """Start it with :meth:`start`, end it with :meth:`stop`; between them :attr:`process` runs.

    The log goes to a file, never to a pipe that somebody must empty.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.key = options.key or (None if is_loopback(options.host) else secrets.token_urlsafe(24))
        self.ports: dict[str, int] = {}
        self.prefix: Prefix | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.log = options.log_dir / "tritonserver.log"
        self.sessions: set[int] = set()
        self._from = 0
        self._settled: dict[str, int] = {}

    @property
    def reach(self) -> str:
        """The host under which this machine reaches the server."""
        return LOOPBACK if self.options.host in ("0.0.0.0", "::") else self.options.host

    @property
    def headers(self) -> dict[str, str]:
        """What a gRPC call to a restricted API carries."""
        return {f"triton-grpc-protocol-{KEY_HEADER}": self.key} if self.key else {}

    def address(self, name: str) -> str:
        host = f"[{self.reach}]" if ":" in self.reach else self.reach
        return f"{host}:{self.ports[name]}"

    def command(self, prefix: str) -> list[str]:
        """The command line, for the ports that were picked."""
        options = self.options
        command = [
            str(options.binary),
            *(f"--model-repository={path}" for path in options.repositories),
            f"--backend-directory={options.backends}",
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            "--model-control-mode=explicit",
            "--exit-on-error=false",
            # Readiness is per pipeline, at the edge: one model that failed does not take the server out.
            "--strict-readiness=false",
            f"--exit-timeout-secs={max(1, round(options.drain_seconds))}",
        ]
        for name in ("http", "grpc", "metrics"):
            command += [f"--{name}-address={options.host}", f"--{name}-port={self.ports[name]}"]
        if self.key:
            command += [
                f"--http-restricted-api={RESTRICTED}:{KEY_HEADER}={self.key}",
                f"--grpc-restricted-protocol={RESTRICTED}:{KEY_HEADER}={self.key}",
            ]
        return [*command, *options.arguments]

    async def start(self) -> None:
        """Return once the server answers; no model is loaded yet. After a death it gets the ports that it had.

        Raises:
            InvalidRequest: a port that was asked for is taken.
            Internal: it ended, or did not answer in time; the message ends with its last log lines.
        """
        wanted = self._settled or self.options.wanted()
        for attempt in range(PORT_ATTEMPTS):
            self.ports = ports.pick(self.options.host, wanted)
            self._spawn()
            if await self._answers():
                self._settled = self.ports
                return
            lost_race = not self.running and 0 in wanted.values() and self._port_was_taken()
            last = self.last_lines()
            await self.stop(0)
            if not lost_race or attempt + 1 == PORT_ATTEMPTS:
                raise Internal(f"tritonserver did not start; its last lines ({self.log}):\n{last}")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def last_lines(self, count: int = 12) -> str:
        """The end of this server's log."""
        return tail(self.log, count, self._from)

    async def stop(self, seconds: float) -> None:
        """End it: SIGTERM, then after `seconds` SIGKILL, for its stubs too; its shared memory goes with it."""
        if self.process is None:
            return
        if self.running and seconds > 0:
            self.process.send_signal(SIGTERM)
            await processes.ended(self.process, seconds)
        if self.running:
            self.process.send_signal(SIGKILL)
        await processes.ended(self.process)
        # A stub that hangs or is stopped outlives its server: as orphans they are this process's children by now.
        await asyncio.to_thread(processes.end_all, {self.process.pid})
        self.release()

    def release(self) -> None:
        """Remove what is left of its shared memory; nobody of its session may run any more."""
        if self.prefix is not None:
            self.prefix.release()
            self.prefix = None

    def _spawn(self) -> None:
        options = self.options
        self.prefix = Prefix()
        env = {**os.environ, **options.env, "OMNI_GRPC": self.address("grpc")}
        if self.key:
            env[KEY_VARIABLE] = self.key
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._from = log.tell()
            self.process = processes.spawn(
                self.command(self.prefix.name), env=env, output=log, pass_fds=[self.prefix.descriptor]
            )
        self.sessions.add(self.process.pid)

    async def _answers(self) -> bool:
        # The ports count once this very process holds them: another may have won one in the meantime and answer there.
        process = self.process
        assert process is not None
        wanted = set(self.ports.values())
        await processes.until(lambda: not self.running or wanted <= ports.held_by(process.pid), START_SECONDS)
        if not self.running:
            return False
        connection = Connection(self.address("grpc"), headers=self.headers)
        try:
            return await connection.live()
        finally:
            await connection.close()

    def _port_was_taken(self) -> bool:
        last = self.last_lines(40).lower()
        return "already in use" in last or "failed to start" in last


def repositories(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The model repositories as absolute paths: the server runs elsewhere."""
    return tuple(path.absolute() for path in paths)

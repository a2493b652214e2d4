"""`triton-omni serve` on a real server: ready, drained, and gone without a trace however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from omni_runtime.errors import OmniError
from omni_runtime.kserve import text
from omni_runtime.kserve_sync import SyncConnection

COMMAND = [sys.executable, "-m", "omni_client.cli", "serve"]
START_SECONDS = 120.0

ECHO_CONFIG = """
name: "echo"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "seconds" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_MODEL } ]
parameters { key: "stages" value: { string_value: "%s" } }
"""
# It says "begun", runs for `seconds`, then says `text`: by a thread, as a stage does.
ECHO_MODEL = """
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        value = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        seconds = pb_utils.get_input_tensor_by_name(request, "seconds").as_numpy()[0].item()
        begun = np.array([b"begun"], dtype=np.object_)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text", begun)]))
        time.sleep(seconds)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text", value)]), flags=FINAL)
"""


def model(repository: Path, name: str, code: str = ECHO_MODEL, stages: str = "") -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    (repository / name / "config.pbtxt").write_text(ECHO_CONFIG.replace('"echo"', f'"{name}"') % stages)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`echo` stands for a pipeline and `echo_stage` for the stage that it names."""
    model(tmp_path / "repository", "echo", stages="echo_stage")
    model(tmp_path / "repository", "echo_stage")
    return tmp_path / "repository"


class Launcher:
    """One `serve` process, its lines as they come, and what it was seen to use."""

    def __init__(self, arguments: list[str], log_dir: Path) -> None:
        self.lines: list[str] = []
        self.errors = log_dir / "stderr"
        log_dir.mkdir(exist_ok=True)
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments, "--log-dir", str(log_dir)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "COLUMNS": "200"},
            )
        self.addresses: dict[str, str] = {}

    def ready(self) -> dict[str, str]:
        assert self.process.stdout is not None
        watchdog = threading.Timer(START_SECONDS, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line.startswith("ready "), f"{line!r}\n{self.errors.read_text()}"
        self.addresses = dict(part.split("=", 1) for part in line.split()[1:])
        self.below = psutil.Process(self.process.pid).children(recursive=True)
        self.prefix = shm_prefix(self.server())
        return self.addresses

    def server(self) -> psutil.Process:
        return next(process for process in self.below if process.name() == "tritonserver")

    def stubs(self) -> list[psutil.Process]:
        return [process for process in self.below if process.name().startswith("triton_python")]

    def ports(self) -> list[int]:
        return [
            int(address.split("/")[2 if "//" in address else 0].split(":")[1]) for address in self.addresses.values()
        ]

    def end(self) -> int:
        return self.process.wait(60)

    def residue(self) -> list[str]:
        """What is left of it: processes, open ports, shared memory."""
        left = [f"process {process}" for process in self.below if process.is_running()]
        left += [f"port {port}" for port in self.ports() if is_open(port)]
        return left + [f"shm {path.name}" for path in Path("/dev/shm").glob(f"{self.prefix}*")]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        for process in getattr(self, "below", []):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def shm_prefix(server: psutil.Process) -> str:
    flag = "--backend-config=python,shm-region-prefix-name="
    return next(word.removeprefix(flag) for word in server.cmdline() if word.startswith(flag))


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def launch(tmp_path: Path, repository: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(*arguments: str, pipeline: str = "echo", ports: bool = True) -> Launcher:
        free = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--openai-port=0"] if ports else []
        launcher = Launcher(
            [pipeline, f"--repository={repository}", *free, *arguments], tmp_path / f"log{len(started)}"
        )
        started.append(launcher)
        return launcher

    yield start
    for launcher in started:
        launcher.close()


class Call:
    """A request that runs in a thread; `begun` is set once the model is at work on it."""

    def __init__(self, address: str, seconds: float, name: str = "echo") -> None:
        self.begun = threading.Event()
        self.texts: list[str] = []
        self.error: Exception | None = None
        self._inputs = {"text": "done", "seconds": np.array([seconds], dtype=np.float32)}
        self._name, self._address = name, address
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection = SyncConnection(self._address)
        try:
            for outputs in connection.stream(self._name, self._inputs, timeout=60):
                self.texts.append(text(outputs, "text"))
                self.begun.set()
        except OmniError as error:
            self.error = error
        finally:
            self.begun.set()
            connection.close()

    def result(self) -> list[str]:
        self._thread.join(60)
        if self.error is not None:
            raise self.error
        return self.texts


def test_ready_names_four_addresses_that_answer(launch: Callable[..., Launcher]) -> None:
    launcher = launch()
    addresses = launcher.ready()
    assert list(addresses) == ["http", "grpc", "metrics", "openai"]
    assert all(is_open(port) for port in launcher.ports())
    assert len(set(launcher.ports())) == 4
    assert Call(addresses["grpc"], 0.0).result() == ["begun", "done"]


def test_sigterm_finishes_what_runs_and_leaves_nothing(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--no-frontend")
    launcher.ready()
    running = Call(launcher.addresses["grpc"], 2.0)
    assert running.begun.wait(30)
    launcher.process.terminate()
    assert running.result() == ["begun", "done"]
    assert launcher.end() == 0
    assert launcher.residue() == []


def test_a_drain_refuses_new_requests_while_one_runs(launch: Callable[..., Launcher]) -> None:
    launcher = launch()
    launcher.ready()
    running = Call(launcher.addresses["grpc"], 3.0)
    assert running.begun.wait(30)
    launcher.process.terminate()
    connection = SyncConnection(launcher.addresses["grpc"])
    assert eventually(lambda: not connection.ready("echo"))
    assert connection.ready("echo_stage"), "a stage goes only when no pipeline needs it"
    connection.close()
    with pytest.raises(OmniError):
        Call(launcher.addresses["grpc"], 0.0).result()
    assert not is_open(launcher.ports()[3]), "the frontend no longer listens"
    assert running.result() == ["begun", "done"]
    assert launcher.end() == 0
    assert launcher.residue() == []


def test_a_drain_ends_within_its_time(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--no-frontend", "--drain-seconds=1")
    launcher.ready()
    running = Call(launcher.addresses["grpc"], 3600.0)
    assert running.begun.wait(30)
    launcher.process.terminate()
    assert launcher.end() == 0
    with pytest.raises(OmniError):
        running.result()
    assert launcher.residue() == []


def test_a_second_interrupt_ends_it_at_once(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--no-frontend", "--drain-seconds=600")
    launcher.ready()
    running = Call(launcher.addresses["grpc"], 3600.0)
    assert running.begun.wait(30)
    launcher.process.send_signal(signal.SIGINT)
    connection = SyncConnection(launcher.addresses["grpc"])
    assert eventually(lambda: not connection.ready("echo"))
    connection.close()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    with pytest.raises(OmniError):
        running.result()
    assert launcher.residue() == []


def test_a_killed_server_is_named_and_started_again(launch: Callable[..., Launcher]) -> None:
    launcher = launch()
    launcher.ready()
    stubs = launcher.stubs()
    assert len(stubs) == 2
    stubs[0].suspend()  # one that cannot see that its server is gone
    launcher.server().kill()
    assert launcher.process.stdout is not None
    assert launcher.process.stdout.readline().startswith("restarted ")
    assert not any(stub.is_running() for stub in stubs)
    errors = launcher.errors.read_text()
    assert "tritonserver ended (signal 9)" in errors
    assert "tritonserver.log" in errors
    assert Call(launcher.addresses["grpc"], 0.0).result() == ["begun", "done"]
    launcher.process.terminate()
    assert launcher.end() == 0
    assert launcher.residue() == []


def test_a_killed_frontend_is_named_and_started_again(launch: Callable[..., Launcher]) -> None:
    launcher = launch()
    launcher.ready()
    edge = next(process for process in launcher.below if "omni_client.launch.edge" in process.cmdline())
    edge.kill()
    assert eventually(lambda: "the frontend is back" in launcher.errors.read_text())
    assert "frontend ended (signal 9)" in launcher.errors.read_text()
    assert is_open(launcher.ports()[3])
    launcher.process.terminate()
    assert launcher.end() == 0
    assert launcher.residue() == []


def test_a_killed_launcher_takes_its_server_along(launch: Callable[..., Launcher]) -> None:
    launcher = launch()
    launcher.ready()
    launcher.process.kill()
    assert launcher.end() == -signal.SIGKILL

    def processes_and_ports() -> list[str]:
        return [line for line in launcher.residue() if not line.startswith("shm")]

    assert eventually(lambda: not processes_and_ports()), processes_and_ports()
    # Nobody was left to remove the shared memory: the next launcher does.
    launch("--no-frontend").ready()
    assert launcher.residue() == []


def test_two_stacks_run_side_by_side(launch: Callable[..., Launcher]) -> None:
    first, second = launch("--no-frontend"), launch("--no-frontend")
    first.ready(), second.ready()
    assert first.prefix != second.prefix
    assert not set(first.ports()) & set(second.ports())
    first.process.terminate()
    assert first.end() == 0
    assert first.residue() == []
    assert Call(second.addresses["grpc"], 0.0).result() == ["begun", "done"]


def test_an_unknown_pipeline_is_refused_with_those_that_exist(launch: Callable[..., Launcher]) -> None:
    launcher = launch(pipeline="ecko")
    assert launcher.end() == 2
    errors = launcher.errors.read_text()
    assert "ecko" in errors and "echo" in errors and "Traceback" not in errors


def test_a_taken_port_is_refused_by_name(launch: Callable[..., Launcher]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launcher = launch(f"--grpc-port={taken.getsockname()[1]}")
        assert launcher.end() == 2
        assert "--grpc-port" in launcher.errors.read_text()


def test_a_stage_that_does_not_load_is_named(launch: Callable[..., Launcher], repository: Path) -> None:
    model(repository, "broken", "raise RuntimeError('no weights here')\n")
    launcher = launch(pipeline="broken")
    assert launcher.end() == 1
    errors = launcher.errors.read_text()
    assert "broken did not load" in errors and "no weights here" in errors and "Traceback (most recent" not in errors


def test_an_open_triton_wants_a_key_for_what_may_run_code(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--no-frontend", "--triton-host=0.0.0.0", "--triton-key=secret")
    address = launcher.ready()["grpc"]
    stranger = SyncConnection(address)
    friend = SyncConnection(address, headers={"triton-grpc-protocol-omni-key": "secret"})
    try:
        assert Call(address, 0.0).result() == ["begun", "done"], "inference stays open"
        with pytest.raises(OmniError, match="restricted"):
            stranger.index()
        assert {row["name"] for row in friend.index()} == {"echo", "echo_stage"}
    finally:
        stranger.close()
        friend.close()
    launcher.process.terminate()
    assert launcher.end() == 0
    assert launcher.residue() == []

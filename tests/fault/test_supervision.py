"""`triton-omni serve` keeps itself alive: what is killed or hangs serves again, and nothing is left when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from omni_client.launch import shm
from omni_runtime.errors import OmniError
from omni_runtime.kserve import parameter
from omni_runtime.kserve_sync import SyncConnection
from omni_runtime.stubs import stub_pids

from tests.conftest import COMMAND, StackAddresses, serving

if sys.platform != "linux":
    pytest.skip("processes are looked after through Linux's /proc", allow_module_level=True)

RECOVERY_SECONDS = 60.0
PROBING = ("--probe-seconds=1", "--probe-timeout=3")


# It answers at once, or, while the file "hang" lies beside it, never.
HANGING_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "number" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "number" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "probe" value { string_value: "{\\"number\\": 1}" } }
"""
HANGING_MODEL = """
import pathlib
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        while pathlib.Path(__file__).with_name("hang").exists():
            time.sleep(0.1)
        number = [pb_utils.get_input_tensor_by_name(request, "number").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("number", each)]) for each in number]
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for temporary files, to see what stays in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


class Stack:
    """A `serve` process as a test sees it."""

    def __init__(self, addresses: StackAddresses, folder: Path) -> None:
        self.addresses = addresses
        self.launcher = psutil.Process(addresses.pid)
        self.errors = folder / "serve.log"
        self.seen: dict[int, psutil.Process] = {}
        self.look()

    def look(self) -> None:
        """Remember every process of it, so that what is left of them at the end is known."""
        self.seen |= {process.pid: process for process in self.launcher.children(recursive=True)}

    def child(self, mark: str) -> psutil.Process:
        for process in self.launcher.children():
            with suppress(psutil.Error):
                if any(mark in word for word in process.cmdline()[:3]):
                    return process
        raise LookupError(mark)

    @property
    def server(self) -> psutil.Process:
        return self.child("tritonserver")

    def stubs(self, model: str) -> list[int]:
        with suppress(LookupError):
            return stub_pids(self.server.pid, model)
        return []

    def speaks(self) -> bool:
        """Whether hibari answers a request."""
        connection = SyncConnection(self.addresses.grpc_url)
        try:
            answers = list(connection.stream("hibari", {"text": "Yes."}, timeout=10))
            return any(answer["audio"].size for answer in answers)
        except OmniError:
            return False
        finally:
            connection.close()

    def said(self, line: str) -> bool:
        return line in self.errors.read_text()

    def recovered(self, old: list[int], model: str = "hibari_tts") -> float:
        """Wait until the model has processes other than `old`, as many, and answers; the seconds that it took."""

        def back() -> bool:
            new = self.stubs(model)
            return len(new) >= len(old) and not set(new) & set(old) and self.speaks()

        began = time.monotonic()
        assert eventually(back), self.errors.read_text()[-3000:]
        self.look()
        return time.monotonic() - began


@contextmanager
def started(folder: Path, *arguments: str, model: str = "hibari") -> Iterator[Stack]:
    """`model`, served; afterwards not a process, a shared-memory file or a temporary folder of it is left."""
    before = {*shm.FOLDER.iterdir()}
    with serving([model], folder, *arguments) as addresses:
        stack = Stack(addresses, folder)
        names = {name for process in stack.seen.values() if (name := prefix(process))}
        yield stack
        stack.look()
        names |= {name for process in stack.seen.values() if (name := prefix(process))}
    left = [process for process in stack.seen.values() if process.is_running()]
    assert not left
    locks = f"triton-omni-{os.getuid()}"
    assert [path.name for path in (folder / "temporary").glob("triton-omni-*") if path.name != locks] == []
    assert not [path for path in {*shm.FOLDER.iterdir()} - before if any(path.name.startswith(name) for name in names)]
    assert "Traceback" not in stack.errors.read_text()


def prefix(process: psutil.Process) -> str:
    flag = "--backend-config=python,shm-region-prefix-name="
    with suppress(psutil.Error):
        return next((word.removeprefix(flag) for word in process.cmdline() if word.startswith(flag)), "")
    return ""


def eventually(condition: Callable[[], bool], seconds: float = RECOVERY_SECONDS) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


class Liveness:
    """Asks /health/live all the time; `statuses` are the answers, 0 for none."""

    def __init__(self, url: str) -> None:
        self.statuses: list[int] = []
        self._url = f"{url}/health/live"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Liveness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(trust_env=False, timeout=10) as client:
            while not self._over.wait(0.1):
                try:
                    self.statuses.append(client.get(self._url).status_code)
                except httpx.HTTPError:
                    self.statuses.append(0)


def kill_a_stage(stack: Stack) -> float:
    old = stack.stubs("hibari_tts")
    os.kill(old[0], signal.SIGKILL)
    return stack.recovered(old)


def halt_a_stage(stack: Stack) -> float:
    old = stack.stubs("hibari_tts")
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    return stack.recovered(old)


def kill_the_server(stack: Stack) -> float:
    old, server = stack.stubs("hibari_tts"), stack.server
    server.kill()
    return stack.recovered(old)


def kill_the_frontend(stack: Stack) -> float:
    old = stack.child("omni_client.launch.edge")
    old.kill()
    began = time.monotonic()
    url = f"{stack.addresses.root_url}/health/ready"

    def back() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(url, trust_env=False).status_code == 200
        return False

    assert eventually(back)
    return time.monotonic() - began


def test_a_stage_that_is_killed_or_stopped_serves_again(tmp_path: Path) -> None:
    with started(tmp_path, "--no-frontend", *PROBING) as stack:
        parent = stack.stubs("hibari")
        print(f"killed stage: {kill_a_stage(stack):.1f} s")
        assert stack.said("hibari_tts: ") and stack.said("; loading it again")
        assert all(stack.speaks() for _ in range(5))
        print(f"stopped stage: {halt_a_stage(stack):.1f} s")
        assert all(stack.speaks() for _ in range(5))
        assert stack.stubs("hibari") == parent, "a pipeline is not loaded again for what it calls"
        os.kill(parent[0], signal.SIGKILL)
        print(f"killed pipeline: {stack.recovered(parent, 'hibari'):.1f} s")


@pytest.mark.long
def test_one_of_two_processes_that_is_stopped_is_found(tmp_path: Path) -> None:
    with started(tmp_path, "--no-frontend", *PROBING) as stack:
        old = stack.stubs("hibari_tts")
        os.kill(old[0], signal.SIGSTOP)
        print(f"stopped process: {stack.recovered(old):.1f} s")


def test_a_killed_server_is_started_again_on_its_ports(tmp_path: Path) -> None:
    with started(tmp_path) as stack, Liveness(stack.addresses.root_url) as liveness:
        frontend = stack.child("omni_client.launch.edge").pid
        print(f"killed server: {kill_the_server(stack):.1f} s")
        assert all(stack.speaks() for _ in range(5))
        assert eventually(lambda: stack.said("tritonserver ended (signal 9)"))
        assert httpx.get(stack.addresses.metrics_url, trust_env=False).status_code == 200
        assert httpx.get(f"{stack.addresses.http_url}/v2/health/live", trust_env=False).status_code == 200
        assert stack.child("omni_client.launch.edge").pid == frontend
        assert set(liveness.statuses) == {200}
        print(f"killed frontend: {kill_the_frontend(stack):.1f} s")


@pytest.mark.long
def test_a_server_that_does_not_live_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="gone"), started(tmp_path, "--no-frontend") as stack:

        def gone() -> bool:
            with suppress(LookupError, psutil.Error):
                stack.look()
                stack.server.kill()
            return stack.launcher.status() == "zombie"

        assert eventually(gone)
        assert stack.said("triton-omni: tritonserver ended (signal 9) too often")
        raise AssertionError("gone")


def test_replicas_are_loaded_and_listed(tmp_path: Path) -> None:
    with started(tmp_path, "--no-frontend", "--replicas=hibari_tts=2", "--replicas=hibari=2") as stack:
        connection = SyncConnection(stack.addresses.grpc_url)
        try:
            assert {row["name"] for row in connection.index() if row.get("state") == "READY"} == {
                "hibari", "hibari_1", "hibari_tts", "hibari_tts_1",
            }  # fmt: skip
            assert parameter(connection.config("hibari_tts"), "replicas") == "hibari_tts_1"
            assert parameter(connection.config("hibari"), "replicas") == "hibari_1"
            assert parameter(connection.config("hibari_tts_1"), "replicas") == ""
            assert parameter(connection.config("hibari_1"), "replica_of") == "hibari"
            answer = list(connection.stream("hibari_1", {"text": "Yes."}, timeout=30))
            assert answer[0]["audio"].size
        finally:
            connection.close()
        kill = stack.stubs("hibari_tts_1")
        os.kill(kill[0], signal.SIGKILL)
        stack.recovered(kill, "hibari_tts_1")


def test_replicas_of_what_is_not_served_are_refused() -> None:
    command = [COMMAND, "serve", "hibari", "--replicas=whisper=2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "whisper is not served here" in ended.stderr


def test_a_model_that_hangs_is_killed_and_loaded_again(tmp_path: Path) -> None:
    version = tmp_path / "repository" / "hanging" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(HANGING_MODEL)
    (version.parent / "config.pbtxt").write_text(HANGING_CONFIG)
    arguments = ("--no-frontend", f"--repository={version.parent.parent}", *PROBING)
    with started(tmp_path, *arguments, model="hanging") as stack:
        old = stack.stubs("hanging")
        (version / "hang").touch()
        assert eventually(lambda: old[0] not in stack.stubs("hanging"))
        (version / "hang").unlink()
        assert eventually(lambda: stack.said("hanging: works again"))
        connection = SyncConnection(stack.addresses.grpc_url)
        answer = connection.infer("hanging", {"number": np.ones(1, np.float32)}, timeout=10)
        connection.close()
        assert answer["number"] == 1
        assert stack.said("hanging: it does not answer (no answer within 3 s)")


@pytest.mark.long
def test_an_end_while_something_is_brought_back_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "--no-frontend") as stack:
        os.kill(stack.stubs("hibari_tts")[0], signal.SIGKILL)
        assert eventually(lambda: stack.said("loading it again"))
    with started(tmp_path, "--no-frontend") as stack:
        stack.server.kill()
        assert eventually(lambda: stack.said("tritonserver ended (signal 9)"))

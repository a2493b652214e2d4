"""A real tritonserver starts from what find_server and make_backends give, also through the wrapper."""

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from omni_build import paths
from omni_build.server import ServerTree, find_server, install_wrapper, make_backends
from omni_build.store import Store
from omni_runtime.kserve import scalar
from omni_runtime.kserve_sync import SyncConnection

CONFIG = """
backend: "{backend}"
max_batch_size: 0
input [{{ name: "x" data_type: TYPE_FP32 dims: [-1] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [-1] }}]
instance_group [{{ count: 1 kind: KIND_CPU }}]
"""
MODEL = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy() * np.float32(2))]
            )
            for r in requests
        ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two models: one with a model.py of its own, one of a Python-based backend of ours."""
    for model, backend in (("double", "python"), ("double_kind", "omni_double")):
        version = tmp_path / "models" / model / "1"
        version.mkdir(parents=True)
        (version / ".keep").touch()
        (version.parent / "config.pbtxt").write_text(CONFIG.format(backend=backend))
    (tmp_path / "models" / "double" / "1" / "model.py").write_text(MODEL)
    kind = tmp_path / "kinds" / "omni_double"
    kind.mkdir(parents=True)
    (kind / "model.py").write_text(MODEL)
    return tmp_path / "models"


@contextmanager
def started(command: list[str], env: dict[str, str], folder: Path | None = None) -> Iterator[str]:
    """Run a server on a free port; yields its gRPC address once it says it is started."""
    prefix = f"omni-tree-{uuid.uuid4().hex[:8]}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *command,
        *("--allow-http=false", "--allow-metrics=false", "--grpc-address=127.0.0.1", f"--grpc-port={port}"),
        f"--backend-config=python,shm-region-prefix-name={prefix}",
    ]
    process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _wait_started(process)
        yield f"127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stderr
        process.stderr.close()
        for left in Path("/dev/shm").glob(f"{prefix}*"):
            left.unlink()


def _wait_started(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr
    log = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        end = time.monotonic() + 30
        while time.monotonic() < end and selector.select(end - time.monotonic()):
            data = os.read(process.stderr.fileno(), 65536)
            log += data
            if b"Started GRPCInferenceService" in log:
                return
            if not data:
                break
    raise AssertionError(f"no server: {log.decode(errors='replace')[-4000:]}")


def _check(address: str) -> None:
    with grpcclient.InferenceServerClient(address) as client:
        assert client.is_server_ready()
        for model in ("double", "double_kind"):
            x = grpcclient.InferInput("x", [3], "FP32")
            x.set_data_from_numpy(np.array([1, 2, 3], np.float32))
            np.testing.assert_array_equal(client.infer(model, [x]).as_numpy("y"), [2, 4, 6])


def _arguments(repository: Path, server: ServerTree) -> list[str]:
    backends = make_backends(Store(repository.parent / "store"), server, repository.parent / "kinds")
    return [f"--model-repository={repository}", f"--backend-directory={backends}"]


def test_starts_and_answers(repository: Path) -> None:
    server = find_server()
    command = [str(server.binary), *_arguments(repository, server)]
    with started(command, {**os.environ, **server.env}) as address:
        _check(address)


def test_wrapper_starts_by_name_alone(repository: Path, tmp_path: Path) -> None:
    """`tritonserver` typed in a shell that knows nothing of the environment."""
    server = find_server()
    wrapper = install_wrapper(tmp_path / "bin")
    env = {"PATH": f"{wrapper.parent}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
    with started(["tritonserver", *_arguments(repository, server)], env) as address:
        _check(address)


BARE_START = """
triton-omni build hibari
exec tritonserver --model-repository=model_repository --model-repository=ensembles \\
  --backend-directory=$(triton-omni backends) --model-control-mode=explicit \\
  --load-model=hibari_tts --load-model=hibari "$@"
"""


def test_bare_start_without_our_launcher(tmp_path: Path) -> None:
    """The commands of the design page, as they stand there; the script finds the server by its --grpc-port."""
    install_wrapper(tmp_path)
    scripts = sysconfig.get_path("scripts")
    env = {"PATH": f"{scripts}:{tmp_path}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
    env |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "OMNI_STORE"))}
    with (
        started(["sh", "-ec", BARE_START, "sh"], env, paths.root()) as address,
        closing(SyncConnection(address)) as server,
    ):
        (spoken,) = server.stream("hibari", {"text": "It works."}, timeout=60)
        assert int(scalar(spoken, "sample_rate")) == 24_000
        assert 0.3 < spoken["audio"].size / 24_000 < 5
        assert np.abs(spoken["audio"]).max() > 0.05


def test_server_on_path_comes_first(repository: Path, tmp_path: Path) -> None:
    """A server laid out as in Triton's own images: bin/tritonserver, backends/python with its stub."""
    wheel = find_server()
    assert wheel.stub
    prefix = tmp_path / "tritonserver"
    (prefix / "bin").mkdir(parents=True)
    shutil.copytree(wheel.backends_dir, prefix / "backends")
    shutil.copy(wheel.stub, prefix / "backends" / "python")
    (prefix / "TRITON_VERSION").write_text("2.51.0\n")
    script = prefix / "bin" / "tritonserver"
    libraries = os.pathsep.join(map(str, wheel.libraries))
    script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{wheel.binary}" "$@"\n')
    script.chmod(0o755)

    server = find_server(str(script.parent))
    assert server == ServerTree(script, prefix / "backends", "2.51.0")
    command = [str(server.binary), *_arguments(repository, server)]
    with started(command, {**os.environ, **server.env}) as address:
        _check(address)

"""docker/install.sh against the tree of a real server in an empty prefix, as an image build runs it.

The image build itself, which wants Docker and NVIDIA's image, is not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest
from omni_build import paths
from omni_build.server import ServerTree, find_server, make_backends
from omni_build.store import Store
from omni_client.launch.triton import ServerOptions, TritonServer
from omni_runtime.kserve import Connection

ROOT = paths.root()
INSTALL = ROOT / "docker" / "install.sh"

if not INSTALL.is_file():
    pytest.skip("this is not a checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def server() -> ServerTree:
    return find_server()


@pytest.fixture(scope="module")
def tree(server: ServerTree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server as a container has it: bin, backends with the stub beside its library, and nothing of ours."""
    prefix = tmp_path_factory.mktemp("opt") / "tritonserver"
    (prefix / "bin").mkdir(parents=True)
    shutil.copy2(server.binary, prefix / "bin" / "tritonserver")
    shutil.copytree(make_backends(Store(), server) / "python", prefix / "backends" / "python")
    return prefix


@pytest.fixture(scope="module")
def python(tree: Path) -> Path:
    """The container's Python: one of its own that has what we need from PyPI, torch above all, and not us."""
    environment = tree.parent / "python"
    venv.create(environment, with_pip=True, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    (packages / "image.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment / "bin" / "python"


def install(tree: Path, python: Path | str, *families: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": str(python), "PIP_ARGS": "--quiet"}
    command = [str(INSTALL), str(tree), *families]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tree: Path, python: Path) -> Path:
    """The tree after install.sh."""
    result = install(tree, python, "hibari")
    assert result.returncode == 0, result.stdout + result.stderr
    return tree


def test_a_tree_gets_backends_models_and_packages(installed: Path, python: Path) -> None:
    tree = installed
    assert {path.name for path in (tree / "backends").iterdir()} >= {"python", "omni_module", "omni_ar"}
    assert (tree / "omni_models" / "hibari_tts" / "config.pbtxt").is_file()
    # Not the checkout that this test runs in: the tree works when that is gone.
    where = "import omni_runtime, omni_build.paths; print(omni_runtime.__file__, omni_build.paths.root())"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True, cwd="/").stdout
    assert str(tree.parent) in found and str(ROOT) not in found


async def test_an_installed_tree_serves_by_itself(
    installed: Path, python: Path, server: ServerTree, tmp_path: Path
) -> None:
    tree = installed
    triton = TritonServer(
        ServerOptions(
            binary=tree / "bin" / "tritonserver",
            backends=tree / "backends",
            repositories=(tree / "omni_models",),
            env={**server.env, "PATH": f"{python.parent}:{os.environ['PATH']}"},
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            log_dir=tmp_path,
        )
    )
    try:
        await triton.start()
        connection = Connection(triton.address("grpc"))
        try:
            for name in ("hibari_tts", "hibari"):
                await connection.load(name)
                assert await connection.ready(name)
            inputs = {"text": "It works.", "stream": True}
            chunks = [outputs["audio"] async for outputs in connection.stream("hibari", inputs)]
        finally:
            await connection.close()
        assert np.abs(np.concatenate(chunks)).max() > 0.01, "speech is not silence"
    finally:
        await triton.stop(10)
    assert str(ROOT) not in triton.log.read_text()


def test_a_second_install_replaces_the_first(installed: Path, python: Path) -> None:
    tree = installed
    stale = tree / "backends" / "omni_module" / "stale.py"
    stale.parent.mkdir(exist_ok=True)
    stale.touch()
    result = install(tree, python)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not stale.exists()


def test_a_folder_without_a_server_is_refused(tmp_path: Path) -> None:
    result = install(tmp_path, sys.executable)
    assert result.returncode == 1
    assert "bin/tritonserver" in result.stderr


def test_a_tree_for_another_python_is_refused(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "tritonserver"
    shutil.copytree(tree, other, symlinks=True)
    (other / "backends" / "python" / "triton_python_backend_stub").write_bytes(b"libpython3.9.so.1.0")
    result = install(other, sys.executable)
    assert result.returncode == 1
    assert "another Python" in result.stderr

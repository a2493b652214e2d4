import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
from omni_build.server import ServerTree, find_server, install_wrapper, libpython, make_backends
from omni_build.store import Store
from omni_runtime.errors import StageUnavailable

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A tree shaped as in Triton's images; nothing in it can run."""
    prefix = tmp_path / "opt"
    python = prefix / "backends" / "python"
    python.mkdir(parents=True)
    (prefix / "backends" / "onnxruntime").mkdir()
    (python / "libtriton_python.so").touch()
    (python / "triton_python_backend_stub").write_bytes(f"libpython{PYTHON}.so.1.0".encode())
    (prefix / "bin").mkdir()
    binary = prefix / "bin" / "tritonserver"
    binary.touch(0o755)
    return binary


def _found(search: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m omni_build.server` on another PATH."""
    command = [sys.executable, "-m", "omni_build.server"]
    return subprocess.run(command, env={"PATH": search, **env}, capture_output=True, text=True, check=False)


def test_path_comes_before_the_wheel(installed: Path) -> None:
    server = find_server(f"/nowhere:{installed.parent}")
    assert (server.binary, server.backends_dir) == (installed, installed.parent.parent / "backends")
    assert server.stub is None
    assert server.env["PATH"].startswith(sysconfig.get_path("scripts"))
    assert "LD_LIBRARY_PATH" not in server.env


def test_the_wheel_brings_a_server() -> None:
    server = find_server("/nowhere")
    assert server.version == "nvidia-pytriton-0.7.0"
    assert os.access(server.binary, os.X_OK)
    assert server.stub and server.stub.parent.name == PYTHON
    first, second = server.env["LD_LIBRARY_PATH"].split(":")[:2]
    assert (Path(first) / f"libpython{PYTHON}.so.1.0").is_file()
    assert Path(second).name == "nvidia_pytriton.libs"


def test_the_wrapper_does_not_pass_for_a_server(tmp_path: Path, installed: Path) -> None:
    wheel = find_server("/nowhere").binary
    wrapper = install_wrapper(tmp_path / "bin")
    assert wrapper == tmp_path / "bin" / "tritonserver"
    assert find_server(str(wrapper.parent)).binary == wheel
    assert find_server(f"{wrapper.parent}:{installed.parent}").binary == installed
    assert install_wrapper(tmp_path / "bin").read_text() == wrapper.read_text()


def test_the_wheels_own_binary_on_path_is_the_wheel(tmp_path: Path) -> None:
    wheel = find_server("/nowhere")
    (tmp_path / "tritonserver").symlink_to(wheel.binary)
    assert find_server(str(tmp_path)) == wheel


def test_a_foreign_command_is_not_overwritten(tmp_path: Path) -> None:
    foreign = tmp_path / "tritonserver"
    foreign.write_text("#!/bin/sh\n")
    with pytest.raises(StageUnavailable, match="is not ours"):
        install_wrapper(tmp_path)
    assert foreign.read_text() == "#!/bin/sh\n"


def test_a_server_without_python_backend_is_named(installed: Path) -> None:
    (installed.parent.parent / "backends" / "python" / "libtriton_python.so").unlink()
    with pytest.raises(StageUnavailable, match=rf"{installed} has no python backend in {installed.parent.parent}"):
        find_server(str(installed.parent))


def test_a_stub_for_another_python_is_named(installed: Path) -> None:
    stub = installed.parent.parent / "backends" / "python" / "triton_python_backend_stub"
    stub.write_bytes(b"\0libpython3.99.so.1.0\0")
    with pytest.raises(StageUnavailable, match=r"runs Python 3\.99 .* python3\.99 -m venv"):
        find_server(str(installed.parent))


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("numpy", "2.1.0", "loses tensors with NumPy 2, and 2.1.0 is installed: "),
        ("nvidia_pytriton", "0.7.0", "has no server or no stub"),
    ],
)
def test_a_wrong_package_is_named_with_its_remedy(tmp_path: Path, package: str, version: str, expected: str) -> None:
    metadata = tmp_path / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    told = _found("/usr/bin", PYTHONPATH=str(tmp_path))
    assert told.returncode == 1
    assert expected in told.stderr
    assert f"{sys.executable} -m pip install" in told.stderr


def test_a_missing_libpython_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(StageUnavailable, match=rf"libpython{PYTHON}\.so\.1\.0.*(pyenv install|apt-get|dnf|uv venv)"):
        libpython([tmp_path])


def test_the_command_says_what_it_found(installed: Path) -> None:
    assert _found(str(installed.parent)).stdout == f"{installed}\n"


def _kinds(root: Path) -> Path:
    for name in ("omni_ar", "omni_module"):
        (root / name).mkdir(parents=True)
        (root / name / "model.py").touch()
    (root / "omni_runtime").mkdir()
    return root


def test_backends_hold_the_servers_and_ours(store: Store, tmp_path: Path, installed: Path) -> None:
    made = make_backends(store, find_server(str(installed.parent)), _kinds(tmp_path / "kinds"))
    assert sorted(path.name for path in made.iterdir()) == ["omni_ar", "omni_module", "onnxruntime", "python"]
    assert (made / "omni_ar" / "model.py").exists()
    assert not (made / "python" / "triton_python_backend_stub").is_symlink()


def test_the_wheels_stub_is_put_in_place_and_mended(store: Store, tmp_path: Path) -> None:
    server, kinds = find_server("/nowhere"), _kinds(tmp_path / "kinds")
    made = make_backends(store, server, kinds)
    stub = made / "python" / "triton_python_backend_stub"
    assert os.access(stub, os.X_OK)
    # The server refuses a library whose real path is elsewhere.
    assert (made / "python" / "libtriton_python.so").resolve().is_relative_to(store.path.resolve())
    stub.unlink()
    assert make_backends(store, server, kinds) == made
    assert os.access(stub, os.X_OK)


def test_checkouts_and_servers_have_directories_of_their_own(store: Store, tmp_path: Path, installed: Path) -> None:
    server = find_server(str(installed.parent))
    other = ServerTree(server.binary, server.backends_dir, "9.9")
    one, two = _kinds(tmp_path / "one"), _kinds(tmp_path / "two")
    assert (
        len({make_backends(store, server, one), make_backends(store, server, two), make_backends(store, other, one)})
        == 3
    )


def test_two_at_once(store: Store, tmp_path: Path) -> None:
    server, kinds = find_server("/nowhere"), _kinds(tmp_path / "kinds")
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(make_backends(store, server, kinds))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert list(store.backends.iterdir()) == [made[0]]

"""Find a Triton server, and make the directory of backends it is started with.

A `tritonserver` on PATH comes first (a container, or one built from source). Else the one inside the `nvidia-pytriton`
wheel, which starts without its Python API: its Python stub finds the environment through PATH and the shared
libpython through LD_LIBRARY_PATH.

    python -m omni_build.server           # says which server was found
    python -m omni_build.server wrapper   # writes <venv>/bin/tritonserver where there is no other
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omni_runtime.errors import OmniError, StageUnavailable

from omni_build import paths
from omni_build.store import Store, write_atomic

WHEEL = "nvidia-pytriton"
GLIBC = (2, 35)
_MARK = "# triton-omni: starts the tritonserver of the nvidia-pytriton wheel"
_STUB = "triton_python_backend_stub"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class ServerTree:
    """A server that can be started: run `binary` with `os.environ | env`."""

    binary: Path
    backends_dir: Path
    version: str
    #: what the dynamic linker needs besides the system's own
    libraries: tuple[Path, ...] = ()
    #: the Python stub to put into the `python` backend, where the server's own folder has none
    stub: Path | None = None

    @property
    def env(self) -> dict[str, str]:
        """What to set: the first `python3` on PATH is the one whose packages the stubs see."""
        env = {"PATH": os.pathsep.join([str(_scripts()), os.environ.get("PATH", os.defpath)])}
        if self.libraries:
            before = os.environ.get("LD_LIBRARY_PATH", "")
            env["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, self.libraries), *([before] if before else [])])
        return env


def find_server(search: str | None = None) -> ServerTree:
    """The server on `search` (default: $PATH), else the pip wheel's.

    Raises StageUnavailable that names the one command which brings what is missing.
    """
    binary = _on_path(os.environ.get("PATH", "") if search is None else search)
    return _installed(binary) if binary else _wheel()


def make_backends(store: Store, server: ServerTree, kinds: Path | None = None) -> Path:
    """A directory for `--backend-directory`: the server's own backends and ours (`kinds`, default: this checkout's).

    Named by what it links, so that servers and checkouts side by side keep directories of their own.
    """
    kinds = kinds or paths.backends()
    links = {folder.name: folder for folder in sorted(server.backends_dir.iterdir()) if folder.is_dir()}
    links |= {folder.name: folder for folder in sorted(kinds.glob("omni_*")) if (folder / "model.py").is_file()}
    identity = [server.version, _PYTHON, str(server.stub), *(f"{name}={folder}" for name, folder in links.items())]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]
    made = store.backends / f"py{_PYTHON}-{digest}"
    if _intact(made, links, server):
        return made
    with store.lock(f"backends-{made.name}"):
        if _intact(made, links, server):
            return made
        with store.fresh_dir(made) as fresh:
            for name, folder in links.items():
                if name == "python" and server.stub:
                    _python_backend(fresh / name, folder, server.stub)
                else:
                    (fresh / name).symlink_to(folder.resolve())
    return made


def install_wrapper(bin_dir: Path | None = None) -> Path:
    """Make `tritonserver` a command: the one on PATH, else a script in `bin_dir` (default: this environment's).

    Returns the path of the command. Raises StageUnavailable when no server is found.
    """
    server = find_server()
    if server.stub is None:
        return server.binary
    libraries = os.pathsep.join(map(str, server.libraries))
    scripts = Path(bin_dir) if bin_dir else _scripts()
    text = f"""#!/bin/sh
{_MARK}
PATH={shlex.quote(str(_scripts()))}:"$PATH"
LD_LIBRARY_PATH={shlex.quote(libraries)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
export PATH LD_LIBRARY_PATH
exec {shlex.quote(str(server.binary))} "$@"
"""
    wrapper = scripts / "tritonserver"
    if wrapper.exists() and not _is_wrapper(wrapper):
        raise StageUnavailable(f"{wrapper} is not ours and is not on PATH: put {scripts} on PATH, or remove it")
    write_atomic(wrapper, text.encode(), mode=0o755)
    return wrapper


def _on_path(search: str) -> Path | None:
    for entry in search.split(os.pathsep):
        candidate = Path(entry or ".") / "tritonserver"
        if candidate.is_file() and os.access(candidate, os.R_OK | os.X_OK) and not _is_wrapper(candidate):
            binary = candidate.resolve()
            # The wheel's own binary, linked onto PATH, still needs the wheel's environment.
            if binary.parts[-4:] != ("pytriton", "tritonserver", "bin", "tritonserver"):
                return binary
    return None


def _is_wrapper(candidate: Path) -> bool:
    with candidate.open("rb") as file:
        return _MARK.encode() in file.read(512)


def _installed(binary: Path) -> ServerTree:
    prefix = binary.parent.parent
    candidates = [prefix / "backends", Path("/opt/tritonserver/backends")]
    backends = next((folder for folder in candidates if (folder / "python" / "libtriton_python.so").is_file()), None)
    if backends is None:
        raise StageUnavailable(
            f"{binary} has no python backend in {candidates[0]}: take an image that has it (…-py3, …-py3-sdk), "
            "or take that tritonserver off PATH to use the one of nvidia-pytriton"
        )
    stub = backends / "python" / _STUB
    if stub.is_file() and (found := re.search(rb"libpython(3\.\d+)", stub.read_bytes())):
        theirs = found[1].decode()
        if theirs != _PYTHON:
            raise StageUnavailable(
                f"the stub of {binary} runs Python {theirs} and triton-omni is installed for {_PYTHON}: "
                f"python{theirs} -m venv .venv, and install triton-omni there"
            )
    mark = prefix / "TRITON_VERSION"
    version = mark.read_text().strip() if mark.is_file() else str(binary.stat().st_mtime_ns)
    return ServerTree(binary, backends, version)


def _wheel() -> ServerTree:
    system = f"{sys.platform} {platform.machine()}"
    if system != "linux x86_64":
        raise StageUnavailable(
            f"no tritonserver on PATH, and the one of {WHEEL} is for linux x86_64, not {system}: "
            "docker compose -f docker/compose.yaml up"
        )
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < GLIBC:
        raise StageUnavailable(
            f"no tritonserver on PATH, and the one of {WHEEL} needs glibc {GLIBC[0]}.{GLIBC[1]} or newer (Debian 12, "
            f"Ubuntu 22.04), this system has {libc or 'another'} {version}: docker compose -f docker/compose.yaml up"
        )
    try:
        wheel = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise StageUnavailable(
            f"no tritonserver on PATH and none from pip: {sys.executable} -m pip install 'triton-omni[server,triton]'"
        ) from None
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise StageUnavailable(
            f"the server of {WHEEL} loses tensors with NumPy 2, and {numpy} is installed: "
            f"{sys.executable} -m pip install 'numpy<2'"
        )
    tree = Path(str(wheel.locate_file("pytriton/tritonserver"))).resolve()
    binary = tree / "bin" / "tritonserver"
    stub = tree / "python_backend_stubs" / _PYTHON / _STUB
    if not (binary.is_file() and stub.is_file()):
        raise StageUnavailable(
            f"{WHEEL} {wheel.version} has no server or no stub for Python {_PYTHON}: "
            f"{sys.executable} -m pip install --force-reinstall --no-deps nvidia-pytriton==0.7.0"
        )
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)
    libraries = (libpython(), tree.parent.parent / "nvidia_pytriton.libs")
    return ServerTree(binary, tree / "backends", f"{WHEEL}-{wheel.version}", libraries, stub)


def libpython(folders: Sequence[Path] | None = None) -> Path:
    """The directory of the shared library of this Python, of `folders` (default: where they usually lie).

    Raises StageUnavailable with the command that brings it.
    """
    name = f"libpython{_PYTHON}.so.1.0"
    if folders is None:
        configured = sysconfig.get_config_var("LIBDIR")
        system = ("/usr/lib/x86_64-linux-gnu", "/usr/local/lib", "/usr/lib64", "/usr/lib")
        folders = [Path(sys.base_prefix, "lib"), *([Path(configured)] if configured else []), *map(Path, system)]
    for folder in folders:
        if (folder / name).is_file():
            return folder
    if ".pyenv" in sys.base_prefix:
        advice = f"PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {platform.python_version()}"
    elif Path("/etc/debian_version").is_file() and sys.base_prefix == "/usr":
        advice = f"sudo apt-get install libpython{_PYTHON}"
    elif Path("/etc/redhat-release").is_file() and sys.base_prefix == "/usr":
        advice = f"sudo dnf install python{_PYTHON}-libs"
    else:
        advice = f"uv venv --clear --managed-python --python {_PYTHON} .venv, and install again"
    raise StageUnavailable(f"the server needs {name}, and {sys.base_prefix} has only a static Python: {advice}")


def _scripts() -> Path:
    return Path(sysconfig.get_path("scripts"))


def _python_backend(made: Path, source: Path, stub: Path) -> None:
    made.mkdir()
    for file in source.iterdir():
        if file.is_file():
            # Copies: the server refuses a library whose real path leaves the backend's folder.
            shutil.copy(file, made / file.name)
    shutil.copyfile(stub, made / _STUB)
    (made / _STUB).chmod(0o755)


def _intact(made: Path, links: dict[str, Path], server: ServerTree) -> bool:
    if not all((made / name).is_dir() for name in links):
        return False
    stub = made / "python" / _STUB
    library = made / "python" / "libtriton_python.so"
    if not library.is_file():
        return False
    if server.stub is None:
        return True
    return stub.is_file() and os.access(stub, os.X_OK) and stub.stat().st_size == server.stub.stat().st_size


def main(arguments: list[str]) -> int:
    """The command `python -m omni_build.server`."""
    try:
        print(install_wrapper() if arguments == ["wrapper"] else find_server().binary)
    except OmniError as error:
        print(f"triton-omni: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The store: everything that is fetched or made, outside any repository, safe when two builds run at once.

    packages/    wheels as they were downloaded, named as their index names them
    weights/     <name>/<version>/ with the files of one model and files.json, their sizes and hashes
    engines/     compiled for this machine
    backends/    directories for --backend-directory
    voices/      enrolled voices
    locks/       one file per thing being made

A directory appears in the store complete, by a rename, or not at all.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omni_runtime.errors import NotFound

MANIFEST = "files.json"


def default_path() -> Path:
    """`$OMNI_STORE`, else `~/.cache/triton-omni`."""
    return Path(os.environ.get("OMNI_STORE") or "~/.cache/triton-omni").expanduser()


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class Store:
    """A directory on disk; `path` defaults to `default_path()`."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path).expanduser().absolute() if path else default_path().absolute()

    @property
    def packages(self) -> Path:
        return self.path / "packages"

    @property
    def engines(self) -> Path:
        return self.path / "engines"

    @property
    def backends(self) -> Path:
        return self.path / "backends"

    @property
    def voices(self) -> Path:
        return self.path / "voices"

    def weights(self, name: str) -> Path:
        """The newest weights made under `name`. Raises NotFound when there are none."""
        folder = self.path / "weights" / name
        versions = sorted(folder.glob(f"*/{MANIFEST}"), key=lambda file: file.stat().st_mtime_ns)
        if not versions:
            raise NotFound(f"no weights of {name} in {self.path}: triton-omni build makes them")
        return versions[-1].parent

    def weights_dir(self, name: str, version: str) -> Path:
        """Where one version of the weights of `name` lies, or will lie."""
        return self.path / "weights" / name / version

    @contextmanager
    def lock(self, name: str, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the lock `name` between processes; the kernel frees it when a holder dies.

        `waiting(name)` is called once when another process holds it.
        """
        folder = self.path / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name.replace('/', '_')}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    waiting(name)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def fresh_dir(self, final: Path) -> Iterator[Path]:
        """An empty directory that becomes `final` when the block ends well; what was there before is dropped.

        Hold a lock around it: two writers of one directory would each win once.
        """
        final.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        try:
            yield made
            made.chmod(0o755)
            old = made.with_name(made.name + ".old")
            if final.exists():
                final.rename(old)
            made.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def make(self, name: str, version: str, fill: Callable[[Path], None], say: Callable[[str], None]) -> Path:
        """The weights `name` at `version`; made by `fill(empty directory)` unless they are there and sound.

        Damage is named through `say`, and mended by making them anew.
        """
        folder = self.weights_dir(name, version)
        if folder.is_dir() and not damage(folder):
            return folder
        with self.lock(f"weights-{name}", lambda _: say(f"{name}: another build makes it")):
            if folder.is_dir():
                wrong = damage(folder)
                if not wrong:
                    return folder
                for line in wrong:
                    say(f"{line}; it is made again")
            with self.fresh_dir(folder) as fresh:
                fill(fresh)
                seal(fresh)
        return folder


def seal(folder: Path) -> None:
    """Record size, time and hash of every file of a finished weights directory in `files.json`."""
    manifest = {
        file.name: _stat(file) | {"sha256": sha256(file)} for file in sorted(folder.iterdir()) if file.is_file()
    }
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def damage(folder: Path, full: bool = False) -> list[str]:
    """What is wrong with a sealed directory, one line per file; empty when all is as it was sealed.

    A file whose size and time are those recorded is taken as good unless `full`; any other is hashed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return [f"{folder} has no readable {MANIFEST}"]
    found = []
    for name, was in manifest.items():
        file = folder / name
        if not file.is_file():
            found.append(f"{file} is missing")
        elif full or _stat(file) != {key: was[key] for key in ("size", "mtime_ns")}:
            digest = sha256(file)
            if digest != was["sha256"]:
                size = file.stat().st_size
                found.append(
                    f"{file} is corrupt: expected {was['size']} bytes, sha256 {was['sha256']}, found {size}, {digest}"
                )
    return found


def _stat(file: Path) -> dict[str, Any]:
    stat = file.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}

"""Names in /dev/shm that belong to one server, and the removal of those whose server is gone.

Triton's Python backend names its shared-memory regions `<prefix><uuid>` and leaves them behind when it is killed. Each
server gets a prefix of its own, held by a lock on `/dev/shm/<prefix>.lock`. The lock is inherited by the server, so it
is free only when the launcher, the server and its stubs are all gone: then the files are nobody's, in whichever
container or process namespace they were made.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
_NAME = "omni-"


class Prefix:
    """A fresh prefix, locked; `descriptor` is to be passed on to the server.

    Raises:
        OSError: /dev/shm cannot be written to.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        while True:
            self.name = f"{_NAME}{secrets.token_hex(4)}-"
            self.descriptor = os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # A sweep that runs just now may hold the new file for a moment, and remove it as nobody's.
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            if os.fstat(self.descriptor).st_nlink:
                break
            os.close(self.descriptor)

    @property
    def _lock(self) -> Path:
        return self.folder / f"{self.name}.lock"

    def files(self) -> list[Path]:
        """The regions of this prefix that exist, the lock left out."""
        return sorted(path for path in self.folder.glob(f"{self.name}*") if path != self._lock)

    def release(self) -> None:
        """Remove every file of this prefix; call it when the server and its stubs have ended."""
        _remove(self.folder, self.name)
        os.close(self.descriptor)


def sweep(folder: Path = FOLDER) -> list[str]:
    """Remove the files of prefixes that nobody holds any more; returns those prefixes."""
    swept: list[str] = []
    for lock in folder.glob(f"{_NAME}*.lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, lock.stem)
            swept.append(lock.stem)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return swept


def _remove(folder: Path, name: str) -> None:
    for path in sorted(folder.glob(f"{name}*"), key=lambda path: path.suffix == ".lock"):  # the lock last
        with suppress(OSError):
            path.unlink()

"""What a machine must have before anything is downloaded; what lacks is named with the command that brings it.

Runs as a script on a bare Python (`python3.11 machine.py`), so it imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

GLIBC = (2, 35)
DISK = 4 << 30


def shared_libpython() -> Path | None:
    """The folder and name of this interpreter's `libpythonX.Y.so.1.0`, or None when there is no shared one."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"):
        if folder and (Path(folder) / name).exists():
            return Path(folder) / name
    try:
        ctypes.CDLL(name)  # the loader's own search path: /usr/lib/x86_64-linux-gnu on Debian
    except OSError:
        return None
    return Path(name)


def missing(folder: Path = Path()) -> list[str]:
    """One line per thing that this machine lacks, each with its remedy; empty when it can install and serve.

    `folder` is where the environment will be made: its file system must have room.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    lacks: list[str] = []
    if version not in ("3.11", "3.12"):
        lacks.append(
            f"Python 3.11 or 3.12 (this one is {version}): apt-get install -y python3.11 python3.11-venv libpython3.11"
            "   then: make install PYTHON=python3.11"
        )
        return lacks
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        lacks.append(
            f"x86-64 Linux (this is {platform.system()} {platform.machine()}): "
            "the server that pip installs is built for it alone; use docker/compose.yaml"
        )
        return lacks
    name, glibc = platform.libc_ver()
    if name != "glibc" or tuple(map(int, glibc.split(".")[:2])) < GLIBC:
        lacks.append(f"glibc 2.35 (this is {name or 'unknown'} {glibc}): use Ubuntu 22.04, Debian 12 or newer")
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        lacks.append(f"the venv module of Python {version}: apt-get install -y python{version}-venv")
    if shared_libpython() is None:
        lacks.append(f"a shared libpython{version}, for Triton's Python backend: apt-get install -y libpython{version}")
    free = shutil.disk_usage(folder.resolve()).free
    if free < DISK:
        lacks.append(f"{DISK >> 30} GiB of free disk in {folder.resolve()} (it has {free / (1 << 30):.1f})")
    return lacks


def main() -> int:
    lacks = missing()
    for line in lacks:
        print(f"This machine lacks {line}", file=sys.stderr)
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main())

"""Children that cannot outlive their parent, on Linux.

The launcher is a *subreaper*: whatever its children leave behind becomes its own child, so that it can be found and
ended. A child gets a *parent-death signal*, so that it ends even when the launcher is killed and can do nothing more.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36
_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # it died before the call above
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants.

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output: IO[bytes],
    stdin: IO[bytes] | None = None,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own (a Ctrl-C is the launcher's to handle), to be killed if we die.

    Call it from the main thread: the kernel sends the parent-death signal when the *thread* that forked ends.
    """
    # The signal is set by a small program that then becomes `command`: Python code between fork and exec is unsafe
    # beside gRPC's threads, and makes gRPC run its fork handlers.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command],
        env=dict(env),
        stdin=stdin or subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )


def stopped(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that a SIGSTOP keeps from running; one that a debugger holds is not meant."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                found.append(pid)
    return found


def _table() -> dict[int, tuple[int, int]]:
    """Parent and session of every process that /proc shows."""
    table: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                # the command's name stands in brackets and may hold anything, blanks and brackets too
                _, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                table[int(entry.name)] = int(parent), int(session)
    return table


def descendants(root: int | None = None, sessions: Collection[int] | None = None) -> list[int]:
    """Every process below `root` (default: this one), zombies too, parents before their children.

    `sessions`: only those that belong to one of these; None: all.
    """
    table = _table()
    found = [os.getpid() if root is None else root]
    for pid in found:
        found.extend(child for child, (parent, _) in table.items() if parent == pid)
    return [pid for pid in found[1:] if sessions is None or table[pid][1] in sessions]


def reap(sessions: Collection[int] | None = None, but: Collection[int] = ()) -> None:
    """Collect children that ended, so that no zombie stays; pids in `but` are left to whoever started them."""
    me = os.getpid()
    for pid, (parent, session) in _table().items():
        if parent == me and pid not in but and (sessions is None or session in sessions):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_all(sessions: Collection[int] | None = None, seconds: float = 5.0) -> list[int]:
    """Kill and collect every descendant of these sessions, whatever state it is in; returns the pids that were killed.

    Those that a dying process forks meanwhile are found in the next round.
    """
    killed: list[int] = []
    limit = time.monotonic() + seconds
    while alive := descendants(sessions=sessions):
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if pid not in killed:
                killed.append(pid)
        reap(sessions)
        if time.monotonic() > limit:
            break
        time.sleep(0.01)
    return killed


async def ended(process: subprocess.Popen[bytes], seconds: float | None = None) -> int | None:
    """The exit status of `process` once it ends (negative: the signal), None when `seconds` passed first."""
    if process.poll() is not None:
        return process.returncode
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    try:
        loop.add_reader(descriptor, over.set)
        async with asyncio.timeout(seconds):
            await over.wait()
    except TimeoutError:
        return None
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


async def until(condition: Callable[[], bool], seconds: float, every: float = 0.02) -> bool:
    """Whether `condition` became true within `seconds`."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        await asyncio.sleep(every)
    return True

"""Nothing outlives its launcher: in a process of its own, since being a subreaper cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("processes are looked after through Linux's /proc and prctl", allow_module_level=True)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def gone(pid: int) -> bool:
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # in a container without an init that reaps, an orphan's body stays
            return True
        time.sleep(0.02)
    return False


def test_orphans_and_stopped_processes_are_found_and_ended() -> None:
    result = python("""
        import os, subprocess
        from omni_client.launch import processes
        processes.become_subreaper()
        out = open(os.devnull, "wb")
        script = "sleep 600 & sleep 600 & kill -STOP $!; exit 0"
        shell = processes.spawn(["sh", "-c", script], env=os.environ, output=out)
        shell.wait()
        orphans = processes.descendants(sessions={shell.pid})
        print(len(orphans), len(processes.end_all({shell.pid})), processes.descendants())
    """)
    assert result.stdout.split() == ["2", "2", "[]"], result


def test_other_sessions_are_spared() -> None:
    result = python("""
        import os, subprocess
        from omni_client.launch import processes
        other = subprocess.Popen(["sleep", "600"])
        with open(os.devnull, "wb") as out:
            own = processes.spawn(["sleep", "600"], env=os.environ, output=out)
        print(processes.end_all({own.pid}) == [own.pid], other.poll())
        other.kill()
        other.wait()
    """)
    assert result.stdout.split() == ["True", "None"], result


def test_a_child_ends_when_its_parent_is_killed() -> None:
    result = python("""
        import os, signal
        from omni_client.launch import processes
        with open(os.devnull, "wb") as out:
            child = processes.spawn(["sleep", "600"], env=os.environ, output=out)
        while open(f"/proc/{child.pid}/comm").read() != "sleep\\n":
            pass
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert result.returncode == -9
    assert gone(int(result.stdout))


def test_end_is_told_as_status_signal_or_none() -> None:
    result = python("""
        import asyncio, os
        from omni_client.launch import processes

        async def main():
            with open(os.devnull, "wb") as out:
                well = processes.spawn(["sh", "-c", "exit 3"], env=os.environ, output=out)
                long = processes.spawn(["sleep", "600"], env=os.environ, output=out)
            print(await processes.ended(well), await processes.ended(long, 0.01))
            long.kill()
            print(await processes.ended(long))

        asyncio.run(main())
    """)
    assert result.stdout.split() == ["3", "None", "-9"], result


def test_a_missing_program_ends_with_an_error_in_its_output(tmp_path: Path) -> None:
    from omni_client.launch import processes

    with (tmp_path / "log").open("wb") as output:
        process = processes.spawn(["/nowhere/tritonserver"], env=os.environ, output=output)
    assert process.wait() != 0
    assert "No such file" in (tmp_path / "log").read_text()

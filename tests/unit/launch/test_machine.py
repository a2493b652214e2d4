from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omni_client.launch import machine


def test_this_machine_lacks_nothing() -> None:
    assert machine.missing() == []


def test_it_runs_on_a_bare_python() -> None:
    script = Path(machine.__file__)
    bare = [sys.executable, "-I", "-S", str(script)]
    assert subprocess.run(bare, capture_output=True, text=True, check=False).returncode == 0


def test_a_python_without_a_shared_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "shared_libpython", lambda: None)
    lacks = machine.missing()
    assert len(lacks) == 1
    assert "apt-get install -y libpython3." in lacks[0]

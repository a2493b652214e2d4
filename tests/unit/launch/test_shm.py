from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from omni_client.launch import shm


def test_release_removes_what_has_the_prefix_and_nothing_else(tmp_path: Path) -> None:
    prefix = shm.Prefix(tmp_path)
    (tmp_path / f"{prefix.name}region").touch()
    (tmp_path / "psm_other").touch()
    assert [path.name for path in prefix.files()] == [f"{prefix.name}region"]
    prefix.release()
    assert [path.name for path in tmp_path.iterdir()] == ["psm_other"]


def test_sweep_spares_a_prefix_that_is_held(tmp_path: Path) -> None:
    held = shm.Prefix(tmp_path)
    (tmp_path / f"{held.name}region").touch()
    assert shm.sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2
    held.release()


def test_sweep_removes_a_prefix_whose_launcher_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from omni_client.launch import shm; folder = pathlib.Path(sys.argv[1]);"
        "prefix = shm.Prefix(folder); (folder / f'{prefix.name}region').touch(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    assert len(shm.sweep(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_stays_held_while_a_child_has_the_lock(tmp_path: Path) -> None:
    prefix = shm.Prefix(tmp_path)
    child = subprocess.Popen(["sleep", "600"], pass_fds=[prefix.descriptor])
    os.close(prefix.descriptor)
    assert shm.sweep(tmp_path) == []
    child.kill()
    child.wait()
    assert shm.sweep(tmp_path) == [prefix.name]


def test_names_differ(tmp_path: Path) -> None:
    prefixes = [shm.Prefix(tmp_path) for _ in range(20)]
    assert len({prefix.name for prefix in prefixes}) == 20
    for prefix in prefixes:
        prefix.release()


def test_a_new_prefix_survives_sweeps_that_run_at_once(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from omni_client.launch import shm\n"
        "print('sweeping', flush=True)\n"
        "while not (pathlib.Path(sys.argv[1]) / 'stop').exists(): shm.sweep(pathlib.Path(sys.argv[1]))"
    )
    sweeper = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert sweeper.stdout is not None and sweeper.stdout.readline()
    prefixes = [shm.Prefix(tmp_path) for _ in range(200)]
    for prefix in prefixes:
        assert (tmp_path / f"{prefix.name}.lock").exists()
    (tmp_path / "stop").touch()
    assert sweeper.wait(60) == 0
    sweeper.stdout.close()
    for prefix in prefixes:
        prefix.release()
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]

import subprocess
import sys
from pathlib import Path

import pytest
from omni_build.store import Store, damage, default_path, write_atomic
from omni_runtime.errors import NotFound

from .conftest import Said


def _fill(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")


def test_default_is_omni_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNI_STORE", str(tmp_path))
    assert Store().path == tmp_path
    monkeypatch.delenv("OMNI_STORE")
    assert default_path() == Path("~/.cache/triton-omni").expanduser()


def test_made_once(store: Store, report: Said) -> None:
    made = store.make("net", "1", _fill, report.say)
    assert store.make("net", "1", pytest.fail, report.say) == made == store.weights("net")
    assert damage(made, full=True) == []
    with pytest.raises(NotFound, match="no weights of other"):
        store.weights("other")


@pytest.mark.parametrize("harm", ["content", "size", "missing", "manifest"])
def test_damage_is_named_and_mended(store: Store, report: Said, harm: str) -> None:
    made = store.make("net", "1", _fill, report.say)
    file = made / ("files.json" if harm == "manifest" else "model.bin")
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes({"content": b"Weights", "size": b"", "manifest": b"{"}[harm])
    store.make("net", "1", _fill, report.say)
    assert str(made) in report.text
    assert "made again" in report.text
    assert (made / "model.bin").read_bytes() == b"weights"
    assert damage(made, full=True) == []


def test_a_touched_but_equal_file_is_sound(store: Store, report: Said) -> None:
    made = store.make("net", "1", _fill, report.say)
    (made / "model.bin").write_bytes(b"weights")
    assert damage(made) == []


def test_what_fails_leaves_nothing(store: Store, report: Said) -> None:
    def fail(folder: Path) -> None:
        _fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.make("net", "1", fail, report.say)
    assert list((store.path / "weights" / "net").iterdir()) == []


MAKE = """
import sys
from pathlib import Path
from omni_build.store import Store

def fill(folder):
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")
    (folder / "model.bin").write_bytes(b"weights")

print("here", flush=True)
sys.stdin.readline()
Store(sys.argv[1]).make("net", "1", fill, print)
"""


def test_processes_at_once_make_it_once(store: Store, tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = [sys.executable, "-c", MAKE, str(store.path), str(count)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "here\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert count.read_text() == "made\n"


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "config"
    write_atomic(file, b"old")
    with pytest.raises(TypeError):
        write_atomic(file, "not bytes")  # type: ignore[arg-type]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("config", b"old")]

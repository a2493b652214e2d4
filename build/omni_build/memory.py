"""How much memory each device of this machine has left, in bytes."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path


def free() -> dict[str, int]:
    """`cpu`, and `cuda:0` … where nvidia-smi lists GPUs and the installed torch is not a CPU build."""
    found = {"cpu": cpu()}
    found.update({f"cuda:{index}": count for index, count in enumerate(gpus())})
    return found


def cpu(root: Path = Path("/")) -> int:
    """What the kernel calls available, or what the control group still allows where that is less."""
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    allowed = _cgroup(root)
    return available if allowed is None else min(available, allowed)


def gpus() -> list[int]:
    if shutil.which("nvidia-smi") is None or _torch_is_for_cpu():
        return []
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) * 2**20 for line in answer.split() if line.isdigit()]


def _torch_is_for_cpu() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def _cgroup(root: Path) -> int | None:
    """Bytes that the tightest enclosing control group, version 2 or 1, still allows; page cache counts as free."""
    allowed = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base) and (text := _read(group / limit)).isdigit() and (now := _read(group / used)):
                stat = dict(entry.split() for entry in _read(group / "memory.stat").splitlines())
                allowed.append(int(text) - int(now) + int(stat.get(cache, 0)))
    return max(min(allowed), 0) if allowed else None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

"""What `pip install 'triton-omni[client]'` brings is enough to import the SDK, the command line and the frontend."""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
# Refuses what only other distributions bring, as if it were not installed.
BLOCKER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
IMPORTS = """
import tritonclient.grpc, omni_client.client, omni_client.aio, omni_client.audio, omni_client.decoding
import omni_client.cli, omni_client.say, omni_client.converse, omni_client.frontend.app, omni_client.frontend.server
"""


def brought(requirements: list[str]) -> set[str]:
    """Names of the distributions that these requirements install, theirs included."""
    waiting, seen = [Requirement(text) for text in requirements], set()
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        try:
            inner = [Requirement(text) for text in distribution(wanted.name).requires or ()]
        except PackageNotFoundError:
            continue
        for each in inner:
            extras = ["", *wanted.extras]
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                each.marker = None
                waiting.append(each)
    return {name for name, _ in seen}


def test_the_client_extra_is_enough_to_import_the_client() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    there = brought([*project["dependencies"], *project["optional-dependencies"]["client"]])
    absent = {
        module
        for module, names in packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & (there | {"triton-omni"})
    }
    assert "torch" in absent
    script = f"absent = {sorted(absent)!r}\n{BLOCKER}\n{IMPORTS}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""The repositories that a build fills: version dirs with links into the store, and 1/model.json."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_runtime.errors import NotFound

from omni_build import paths
from omni_build.report import Report
from omni_build.repository import CONFIG
from omni_build.store import MANIFEST, Store, write_atomic

ARGUMENTS = "model.json"


class Target:
    """Where a family is built: this checkout's own repositories, or directories that become one like them."""

    def __init__(self, store: Store, repository: Path, ensembles: Path, report: Report) -> None:
        self.store = store
        self.report = report
        self._repository = repository.absolute()
        self._ensembles = ensembles.absolute()

    def stage(self, name: str, weights: Path, arguments: Mapping[str, Any]) -> None:
        """Fill the version dir of a stage with links to `weights`, and its model.json where there is none yet."""
        version = self._version_dir(self._repository, paths.model_repository(), name)
        wanted = {file.name: file for file in weights.iterdir() if file.is_file() and file.name != MANIFEST}
        for entry in version.iterdir():
            if entry.is_symlink() and entry.name not in wanted and self.store.path in entry.readlink().parents:
                entry.unlink()
        for file_name, file in wanted.items():
            self._link(version / file_name, file)
        text = json.dumps(dict(arguments), indent=2) + "\n"
        file = version / ARGUMENTS
        if not file.exists():
            write_atomic(file, text.encode())
        elif file.read_text() != text:
            self.report.say(f"{file} is kept: it differs from the default")

    def pipeline(self, name: str) -> None:
        """Bring a pipeline's script, or the empty version dir that an ensemble needs."""
        self._version_dir(self._ensembles, paths.ensembles(), name)

    def _version_dir(self, repository: Path, source: Path, name: str) -> Path:
        """`<repository>/<name>/1`, with what the checkout has for the model when the repository is another."""
        own = source / name
        folder = repository / name
        version = folder / "1"
        version.mkdir(parents=True, exist_ok=True)
        if folder.resolve() == own.resolve():
            return version
        if not (own / CONFIG).is_file():
            raise NotFound(f"{own / CONFIG} is missing")
        config = (own / CONFIG).read_bytes()
        if not (folder / CONFIG).is_file() or (folder / CONFIG).read_bytes() != config:
            write_atomic(folder / CONFIG, config)
        for file in own.glob("1/*.py"):
            self._link(version / file.name, file)
        return version

    def _link(self, link: Path, file: Path) -> None:
        if link.is_symlink():
            if link.readlink() == file:
                return
        elif link.exists():
            self.report.say(f"{link} is kept: it is a file, not a link into the store")
            return
        # Made aside and moved: a server that loads just now sees the old link or the new one.
        made = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}")
        try:
            made.symlink_to(file)
            made.replace(link)
        except OSError:
            made.unlink(missing_ok=True)
            raise

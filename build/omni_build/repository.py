"""Read Triton model repositories: what models there are, their tasks, and which models call which."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from omni_runtime.errors import InvalidRequest, NotFound
from tritonclient.grpc import model_config_pb2

CONFIG = "config.pbtxt"


class Repository:
    """One or more `--model-repository` directories, read as one. A model is a folder with a config.pbtxt."""

    def __init__(self, paths: Sequence[Path | str]) -> None:
        self.paths = [Path(path) for path in paths]
        self._folders: dict[str, Path] = {}
        for path in self.paths:
            for config in sorted(path.glob(f"*/{CONFIG}")):
                name = config.parent.name
                if name in self._folders:
                    raise InvalidRequest(f"model {name} is in {self._folders[name].parent} and in {path}")
                self._folders[name] = config.parent

    def names(self) -> list[str]:
        return sorted(self._folders)

    def folder(self, name: str) -> Path:
        """Raises NotFound for a model that is in none of the repositories."""
        if name not in self._folders:
            raise NotFound(f"no model {name!r}; there are: {', '.join(self.names())}")
        return self._folders[name]

    def version_dir(self, name: str) -> Path:
        """The folder of the highest version; `1` where there is none yet."""
        versions = [path for path in self.folder(name).iterdir() if path.is_dir() and path.name.isdigit()]
        return max(versions, key=lambda path: int(path.name), default=self.folder(name) / "1")

    def config(self, name: str) -> Any:
        """The `inference.ModelConfig` message. Raises InvalidRequest, with line and column, where it cannot be read."""
        return _read(self.folder(name) / CONFIG)

    def parameters(self, name: str) -> dict[str, str]:
        return {key: value.string_value for key, value in self.config(name).parameters.items()}

    def task(self, name: str) -> str | None:
        """`chat`, `text_to_speech` …; None for a stage."""
        return self.parameters(name).get("task")

    def calls(self, name: str) -> list[str]:
        """The models that `name` calls itself: its `stages`, and the steps of an ensemble."""
        listed = [part.strip() for part in self.parameters(name).get("stages", "").split(",") if part.strip()]
        steps = [step.model_name for step in self.config(name).ensemble_scheduling.step]
        return list(dict.fromkeys([*listed, *steps]))

    def stages_of(self, name: str) -> list[str]:
        """Every model below `name`, in the order in which they can be loaded: each after those it calls."""
        order: list[str] = []

        def visit(model: str, path: tuple[str, ...]) -> None:
            if model in path:
                raise InvalidRequest(f"{' -> '.join((*path, model))}: a pipeline calls itself")
            for called in self.calls(model):
                visit(called, (*path, model))
            if model not in order:
                order.append(model)

        visit(name, ())
        return order[:-1]


def _read(path: Path) -> Any:
    return _parse(path, path.stat().st_mtime_ns)


@cache
def _parse(path: Path, mtime_ns: int) -> Any:
    try:
        return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise InvalidRequest(f"{path}:{error}") from None

"""What a stage or a script reads of its own configuration: config.pbtxt through Triton, and ``1/model.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_runtime.errors import Internal
from omni_runtime.stage import Limits


@dataclass(frozen=True)
class StageConfig:
    """``parameters`` of config.pbtxt as strings, ``arguments`` of model.json, and where the files lie."""

    name: str
    version_dir: Path
    parameters: Mapping[str, str]
    arguments: Mapping[str, Any]
    output_names: frozenset[str]

    @classmethod
    def from_triton(cls, args: Mapping[str, str]) -> StageConfig:
        """Of the ``args`` that Triton passes to ``initialize``."""
        config = json.loads(args["model_config"])
        version_dir = Path(args["model_repository"]) / args["model_version"]
        arguments_file = version_dir / "model.json"
        return cls(
            name=args["model_name"],
            version_dir=version_dir,
            parameters={key: str(entry["string_value"]) for key, entry in config.get("parameters", {}).items()},
            arguments=json.loads(arguments_file.read_text()) if arguments_file.is_file() else {},
            output_names=frozenset(str(entry["name"]) for entry in config.get("output", [])),
        )

    @property
    def limits(self) -> Limits:
        return Limits(
            max_running=self.integer("max_running", Limits.max_running),
            max_waiting=self.integer("max_waiting", Limits.max_waiting),
            timeout=float(self.parameters.get("timeout_seconds", Limits.timeout)),
        )

    def integer(self, name: str, default: int) -> int:
        try:
            return int(self.parameters.get(name, default))
        except ValueError:
            raise Internal(f"{self.name}: parameter {name} must be a whole number") from None

    def names(self, name: str) -> list[str]:
        """A comma-separated parameter as a list."""
        return [part.strip() for part in self.parameters.get(name, "").split(",") if part.strip()]

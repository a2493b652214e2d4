"""What supervision has done, as Prometheus counters in a text file that another process may show."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, write_to_textfile

VARIABLE = "OMNI_SUPERVISION_METRICS"
"""Names the file to the frontend, which appends it to its own page."""


class Counters:
    """`reloads` by model and `restarts` by process; with `path` the file is replaced, in one step, on every change."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._registry = CollectorRegistry()
        self._reloads = Counter(
            "omni_supervision_reloads", "Times a model was loaded again", ("model", "cause"), registry=self._registry
        )
        self._restarts = Counter(
            "omni_supervision_restarts", "Times a process was started again", ("process",), registry=self._registry
        )
        self._write()

    def reload(self, model: str, cause: str) -> None:
        """`cause` is `ended` or `wedged`."""
        self._reloads.labels(model, cause).inc()
        self._write()

    def restart(self, process: str) -> None:
        self._restarts.labels(process).inc()
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            write_to_textfile(str(self.path), self._registry)

"""`triton-omni models` and `status`: what a server has, and what of it is ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_runtime.errors import StageUnavailable

from omni_client.client import Client


def models(client: Client) -> str:
    """The pipelines a server has loaded, as a table."""
    rows = [
        (model.name, model.task, "ready" if model.ready else "not ready", ", ".join(model.voices))
        for model in client.models()
    ]
    return table(("pipeline", "task", "state", "voices"), rows) if rows else "no pipelines are loaded"


def status(client: Client) -> tuple[str, bool]:
    """The server, every model and every pipeline, and whether all that is loaded is ready.

    StageUnavailable when no server answers.
    """
    if not client.ready():
        raise StageUnavailable(f"no server answers at {client.url}")
    metadata = client.connection.metadata()
    pipelines = client.models()
    states = [
        (entry["name"], entry.get("state", "not loaded").lower(), entry.get("reason", ""))
        for entry in client.connection.index()
    ]
    parts = [f"{metadata.get('name', 'server')} {metadata.get('version', '?')} at {client.url}: live"]
    if states:
        parts.append(table(("model", "state", "reason"), states))
    if pipelines:
        rows = [(model.name, "ready" if model.ready else "not ready", ", ".join(model.stages)) for model in pipelines]
        parts.append(table(("pipeline", "state", "needs"), rows))
    return "\n\n".join(parts), all(model.ready for model in pipelines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    lines = [tuple(head), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )

"""`triton-omni bench`: what the server costs over its engines, measured in one run on the same input."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to `app`; what it needs is imported when it runs."""
    app.command("bench")(bench)


def bench(
    rounds: Annotated[int, typer.Option(min=3, help="How often each figure is measured.")] = 10,
    out: Annotated[Path, typer.Option(help="Where bench.json and the logs go.")] = Path("out"),
    only: Annotated[list[str] | None, typer.Option(help="speech, chat or voice; repeat for several.")] = None,
) -> None:
    """Compare the served pipelines with their engines called directly, alternating in one run."""
    from omni_client.bench.run import main

    raise typer.Exit(main(rounds, out, tuple(only or ("speech", "chat", "voice"))))

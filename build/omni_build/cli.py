"""Commands of `triton-omni` that make things: build, plan, backends."""

from pathlib import Path
from typing import Annotated

import typer

_STORE = typer.Option(help="Where weights lie (default: $OMNI_STORE, else ~/.cache/triton-omni).", show_default=False)
_REPOSITORY = typer.Option(help="A repository of its own to build into, stages and pipelines.", show_default=False)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(build)
    app.command()(plan)
    app.command()(backends)


def build(
    family: Annotated[list[str], typer.Argument(metavar="FAMILY...", help="hibari, whisper, smollm2, voice_chat")],
    store: Annotated[Path | None, _STORE] = None,
    repository: Annotated[Path | None, _REPOSITORY] = None,
    checkpoint: Annotated[str | None, typer.Option(help="A directory or model id, where a family takes one.")] = None,
) -> None:
    """Fetch weights, make what the stages need, and fill their version dirs with links."""
    from omni_build import families, paths
    from omni_build.report import Terminal
    from omni_build.store import Store

    report = Terminal()
    stages, pipelines = (repository, repository) if repository else (paths.model_repository(), paths.ensembles())
    for name in family:
        families.build(name, Store(store), stages, pipelines, report, checkpoint)
        report.say(f"{name} is built in {stages}")


def plan(
    pipeline: Annotated[list[str], typer.Argument(metavar="PIPELINE...", help="What is to be served together.")],
    repository: Annotated[list[Path] | None, typer.Option(help="Repositories to read instead of our own.")] = None,
) -> None:
    """Add up bytes per device of pipelines and their stages; an error where they do not fit this machine."""
    from omni_build import paths
    from omni_build.plan import plan as make
    from omni_build.repository import Repository

    repositories = Repository(repository or [paths.model_repository(), paths.ensembles()])
    print("\n".join(make(pipeline, repositories).lines()))


def backends(store: Annotated[Path | None, _STORE] = None) -> None:
    """Print the directory for `tritonserver --backend-directory`; made where it is not there."""
    from omni_build.server import find_server, make_backends
    from omni_build.store import Store

    print(make_backends(Store(store), find_server()))

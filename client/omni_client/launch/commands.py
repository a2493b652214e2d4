"""The commands `serve` and `demo` on a typer application; what they need is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Port = Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("serve")(serve)
    app.command("demo")(demo)


def serve(
    pipelines: Annotated[
        list[str] | None,
        typer.Argument(metavar="PIPELINE…", help="Pipelines or stages; without any, every pipeline there is."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where the OpenAI port listens; 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    openai_port: Port = 9000,
    http_port: Port = 8000,
    grpc_port: Port = 8001,
    metrics_port: Port = 8002,
    triton_host: Annotated[
        str, typer.Option(help="Where Triton's own ports listen; its repository API then wants a key.")
    ] = "127.0.0.1",
    triton_key: Annotated[
        str | None, typer.Option(envvar="OMNI_TRITON_KEY", help="That key; by default one is made and shown.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="OMNI_API_KEY", help="Ask OpenAI callers for this key; repeat for several."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Allow browsers of this origin; repeat for several.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="NAME=PIPELINE, for clients with fixed names: tts-1=hibari")
    ] = None,
    max_body_mib: Annotated[float, typer.Option(min=0.001, help="Largest body of an OpenAI request.")] = 25.0,
    max_audio_hours: Annotated[float, typer.Option(min=0.001, help="Longest decoded audio of one.")] = 2.0,
    max_connections: Annotated[
        int, typer.Option(min=1, help="OpenAI requests answered at once; others get 429.")
    ] = 256,
    frontend: Annotated[bool, typer.Option(help="Run the OpenAI frontend.")] = True,
    repository: Annotated[
        list[Path] | None, typer.Option(help="Serve this model repository instead of our own; repeat for several.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Where weights and logs lie.", show_default="~/.cache/triton-omni")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Where the logs go.", show_default="logs in the store")] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="What running requests get to finish after SIGTERM.")
    ] = 30.0,
    replicas: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="Serve a stage or a pipeline N times; repeat for several."),
    ] = None,
    probe_seconds: Annotated[
        float, typer.Option(min=0, help="How often each model is asked whether it works; 0 never asks.")
    ] = 10.0,
    probe_timeout: Annotated[
        float, typer.Option(min=0.1, help="What it has to answer; one that is late twice is loaded again.")
    ] = 20.0,
    triton_arg: Annotated[
        list[str] | None, typer.Option(help="A further flag for tritonserver, e.g. --triton-arg=--log-verbose=1")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show Triton's log.")] = False,
) -> None:
    """Serve PIPELINES behind Triton and the OpenAI routes, until SIGTERM or Ctrl-C.

    Prints one line, `ready` with the addresses, once everything is loaded and warm. Models that die or hang are loaded
    again; a tritonserver that dies is started again, on the same ports, with a line `restarted` when it is back.
    """
    from omni_client.launch.guard import Probing
    from omni_client.launch.serve import ServeOptions, main, unique

    aliases = {}
    for pair in alias or ():
        name, _, pipeline = pair.partition("=")
        if not name or not pipeline:
            raise typer.BadParameter(f"an alias is NAME=PIPELINE, not {pair!r}", param_hint="--alias")
        aliases[name] = pipeline
    counts = {}
    for pair in replicas or ():
        name, _, count = pair.partition("=")
        if not name or not count.isdigit():
            raise typer.BadParameter(f"replicas are NAME=N, not {pair!r}", param_hint="--replicas")
        counts[name] = int(count)
    settings = {
        "api_keys": list(api_key or ()),
        "cors_origins": list(cors_origin or ()),
        "aliases": aliases,
        "max_body_bytes": round(max_body_mib * 2**20),
        "max_audio_seconds": max_audio_hours * 3600,
        "max_connections": max_connections,
    }
    options = ServeOptions(
        pipelines=unique(pipelines or ()),
        repositories=tuple(repository or ()),
        store=store,
        host=host,
        triton_host=triton_host,
        triton_key=triton_key,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        openai_port=openai_port,
        frontend=settings if frontend else None,
        drain_seconds=drain_seconds,
        log_dir=log_dir,
        triton_arguments=tuple(triton_arg or ()),
        probing=Probing(probe_seconds, probe_timeout),
        replicas=counts,
    )
    raise typer.Exit(main(options, verbose))


def demo(
    out: Annotated[Path, typer.Option(help="Where the audio and the logs go.")] = Path("out"),
    store: Annotated[Path | None, typer.Option(help="Where weights lie.", show_default="~/.cache/triton-omni")] = None,
) -> None:
    """Hear it: a sentence spoken and read back, and a spoken answer to a spoken question."""
    from omni_client.launch.demo import main

    raise typer.Exit(main(out, store))

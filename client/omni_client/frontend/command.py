"""`triton-omni frontend`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from omni_client.frontend.settings import Settings, parse_aliases

_DEFAULT = Settings()
# Triton's own prefix for the header of a restricted protocol, and the name `serve` gives it.
_KEY_HEADER = "triton-grpc-protocol-omni-key"


def register(app: typer.Typer) -> None:
    """Adds the command `frontend`."""
    app.command("frontend")(frontend)


def frontend(
    triton: Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC endpoint.")] = _DEFAULT.triton,
    triton_metrics: Annotated[
        str | None, typer.Option(help="URL or HOST:PORT of its metrics; port 8002 of the same host if left out.")
    ] = None,
    triton_key: Annotated[
        str | None, typer.Option(envvar="OMNI_TRITON_KEY", help="Key of a server that restricts its repository API.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULT.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = _DEFAULT.port,
    alias: Annotated[list[str] | None, typer.Option(help="NAME=PIPELINE, a further model name. Repeatable.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="OMNI_API_KEY", help="Key that a caller must send. Repeatable.")
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Origin allowed in browsers. Repeatable.")] = None,
    max_body_mib: Annotated[float, typer.Option(help="Largest request body.")] = 25.0,
    max_held_mib: Annotated[float, typer.Option(help="All request bodies in memory at once; others get 429.")] = 1024.0,
    max_audio_hours: Annotated[float, typer.Option(help="Longest decoded audio of a request.")] = 2.0,
    max_connections: Annotated[
        int, typer.Option(help="Requests answered at once; others get 429.")
    ] = _DEFAULT.max_connections,
    max_choices: Annotated[int, typer.Option(help="Most answers in one request.")] = _DEFAULT.max_choices,
    request_timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = _DEFAULT.request_timeout,
    body_timeout: Annotated[float, typer.Option(help="Seconds for a body to arrive.")] = _DEFAULT.body_timeout,
    write_timeout: Annotated[
        float, typer.Option(help="Seconds for a client to read one chunk.")
    ] = _DEFAULT.write_timeout,
    refresh: Annotated[float, typer.Option(help="Seconds between looks at the server's models.")] = _DEFAULT.refresh,
    grace: Annotated[float, typer.Option(help="Seconds for requests in flight after SIGTERM.")] = _DEFAULT.grace,
    decoders: Annotated[int, typer.Option(help="Processes that decode audio.")] = _DEFAULT.decoders,
    log_format: Annotated[str, typer.Option(help="json or text.")] = _DEFAULT.log_format,
) -> None:
    """Run the OpenAI frontend alone, for a Triton server that runs already."""
    if log_format not in ("json", "text"):
        raise typer.BadParameter("must be json or text", param_hint="--log-format")
    try:
        settings = Settings(
            triton=triton, triton_metrics=triton_metrics, host=host, port=port,
            triton_headers={_KEY_HEADER: triton_key} if triton_key else {},
            aliases=parse_aliases(alias or []), api_keys=tuple(api_key or ()), cors_origins=tuple(cors_origin or ()),
            max_body_bytes=int(max_body_mib * 2**20), max_held_bytes=int(max_held_mib * 2**20),
            max_audio_seconds=max_audio_hours * 3600,
            max_connections=max_connections, max_choices=max_choices,
            request_timeout=request_timeout, body_timeout=body_timeout, write_timeout=write_timeout,
            refresh=refresh, grace=grace, decoders=decoders, log_format="text" if log_format == "text" else "json",
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    # The web framework takes a second to import; other commands need not wait for it.
    from omni_client.frontend.server import serve

    try:
        asyncio.run(serve(settings, ready=lambda address: typer.echo(f"ready {address}")))
    except OSError as error:
        typer.echo(f"cannot listen on {host}:{port}: {error.strerror}", err=True)
        raise typer.Exit(1) from None

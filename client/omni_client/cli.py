"""The command `triton-omni`: what calls a server is here; what builds and runs one is imported when it is asked for."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from omni_runtime.errors import InvalidRequest, OmniError

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError:
    raise SystemExit("the command line needs more packages: pip install 'triton-omni[client]'") from None

if TYPE_CHECKING:
    from omni_client.client import Client

# Command: where it is registered, the extra that brings what it needs, and its line in --help.
_ELSEWHERE = {
    "serve": ("omni_client.launch", "server,triton", "Serve pipelines behind Triton and the OpenAI routes."),
    "frontend": ("omni_client.frontend", "client", "Run the OpenAI frontend alone, for a Triton that runs already."),
    "demo": ("omni_client.launch", "demo,server,triton", "Hear it: a sentence spoken and read back, a spoken answer."),
    "bench": ("omni_client.bench", "server,triton", "Compare the served pipelines with their engines called directly."),
    "build": ("omni_build.cli", "build", "Fetch weights and fill the model repository."),
    "plan": ("omni_build.cli", "build", "Add up bytes per device before anything loads."),
    "backends": ("omni_build.cli", "build", "Make the backend directory for a bare tritonserver."),
}


class _Commands(TyperGroup):
    """Imports a command of another package when it is called, and ends every error as one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name in _ELSEWHERE:
            group = typer.Typer()
            import_module(_ELSEWHERE[name][0]).register(group)
            self.commands[name] = typer.main.get_group(group).commands[name]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OmniError as error:
            field = f"{error.param}: " if error.param and error.param not in error.message else ""
            _end(f"error: {field}{' '.join(error.message.split())}", 1)
        except ModuleNotFoundError as error:
            _end(f"error: {_missing(sys.argv[1:], error)}", 1)
        except KeyboardInterrupt:
            _end("cancelled", 130)
        except BrokenPipeError:
            # Who read our output has left. The descriptor must not be flushed again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


def _end(line: str, code: int) -> None:
    typer.echo(line, err=True)
    raise typer.Exit(code)


def _missing(arguments: list[str], error: ModuleNotFoundError) -> str:
    name = next((argument for argument in arguments if argument in _ELSEWHERE), None)
    extra = _ELSEWHERE[name][1] if name else "client"
    return f"the package {error.name} is missing: pip install 'triton-omni[{extra}]'"


app = typer.Typer(
    name="triton-omni",
    cls=_Commands,
    help="Any-to-any models on an NVIDIA Triton server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Url = Annotated[str | None, typer.Option("--url", help="Its gRPC address (default: OMNI_URL, localhost:8001).")]
ModelName = Annotated[str | None, typer.Option("--model", "-m", help="The pipeline; the first ready one if left out.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds for the whole request.")]
Output = Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="wav, mp3, flac, ogg or aac.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("triton-omni"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version)] = False,
) -> None:
    pass


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What to say; - reads standard input.")],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="wav, mp3, flac, ogg or aac; - is stdout. Else played."),
    ] = None,
    format: Annotated[str | None, typer.Option("--format", help="Format instead of the file's extension.")] = None,
    voice: Annotated[str | None, typer.Option(help="A voice of the pipeline.")] = None,
    speed: Annotated[float | None, typer.Option(help="0.25 to 4.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the result repeatable.")] = None,
    stream: Annotated[bool, typer.Option(help="Take the speech sentence by sentence.")] = True,
    model: ModelName = None,
    url: Url = None,
    timeout: Timeout = 600.0,
) -> None:
    """Speak TEXT into a file, to standard output, or aloud. Figures go to standard error."""
    from omni_client.say import say as speak

    with _client(url, timeout) as client:
        settings: Any = {"voice": voice, "speed": speed, "seed": seed}
        line = speak(client, text, output=output, format=format, model=model, stream=stream, settings=settings)
    typer.echo(line, err=True)


@app.command()
def transcribe(
    file: Annotated[str, typer.Argument(help="An audio file of any kind; - reads standard input.")],
    format: Annotated[Literal["text", "srt", "vtt", "json"], typer.Option("--format", "-f")] = "text",
    words: Annotated[bool, typer.Option("--words", help="With times per word (in json).")] = False,
    language: Annotated[str | None, typer.Option(help="Its language, as en.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Words to expect.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 to 1.")] = None,
    model: ModelName = None,
    url: Url = None,
    timeout: Timeout = 600.0,
) -> None:
    """Write down what is said in FILE."""
    from omni_client import subtitles

    settings: Any = {"language": language, "prompt": prompt, "temperature": temperature}
    settings["word_timestamps"] = words or None
    audio = sys.stdin.buffer.read() if file == "-" else Path(file)
    with _client(url, timeout) as client, client.transcribe(audio, model=model, stream=True, **settings) as chunks:
        if format == "text":
            for chunk in chunks:
                typer.echo(chunk.text, nl=False)
            typer.echo()
            return
        transcript = chunks.collect()
    if format == "json":
        typer.echo(json.dumps(asdict(transcript), ensure_ascii=False, indent=2))
    else:
        typer.echo(subtitles.FORMATS[format](transcript.segments), nl=False)


@app.command()
def chat(
    text: Annotated[str | None, typer.Argument(help="What to ask; without it, a conversation.")] = None,
    audio: Annotated[Path | None, typer.Option(help="Ask by speaking: an audio file.")] = None,
    output: Output = None,
    system: Annotated[str | None, typer.Option(help="What the model should know first.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Length of a reply.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the reply repeatable.")] = None,
    voice: Annotated[str | None, typer.Option(help="A voice for the spoken reply.")] = None,
    model: ModelName = None,
    url: Url = None,
    timeout: Timeout = 600.0,
) -> None:
    """Ask by text or speech; the reply is written as it comes, and with -o spoken into a file."""
    from omni_client.converse import Conversation
    from omni_client.encoder import format_of

    if output is not None and text is None and audio is None:
        raise typer.BadParameter("needs a TEXT or --audio to answer", param_hint="--output")
    settings: Any = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "voice": voice}
    target = None if output is None else (Path(output), format_of(output))
    with _client(url, timeout) as client:
        conversation = Conversation(client, model, settings)
        if system is not None:
            conversation.messages.append({"role": "system", "content": system})
        if text is None and audio is None:
            conversation.loop()
        elif line := conversation.turn(text, audio, target):
            typer.echo(line, err=True)


@app.command()
def models(url: Url = None) -> None:
    """List the pipelines that a server has loaded."""
    from omni_client import inspection

    with _client(url) as client:
        typer.echo(inspection.models(client))


@app.command()
def status(url: Url = None) -> None:
    """Show a server, its models and which pipelines are ready; exits 1 when one is not."""
    from omni_client import inspection

    with _client(url) as client:
        text, ready = inspection.status(client)
    typer.echo(text)
    if not ready:
        raise typer.Exit(1)


def _placeholder(name: str, line: str) -> None:
    def elsewhere() -> None:
        raise InvalidRequest(f"{name} is not part of this installation")

    app.command(name, help=line)(elsewhere)


for _name, (_, _, _line) in _ELSEWHERE.items():
    _placeholder(_name, _line)


def _client(url: str | None, timeout: float = 600.0) -> Client:
    from omni_client.client import Client

    return Client(url, timeout=timeout)


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()

"""`triton-omni say`: text to a file, to standard output or to the loudspeaker, as it is spoken."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from omni_runtime.errors import InvalidRequest

from omni_client.client import Client
from omni_client.encoder import Encoder, check_format, encode, format_of
from omni_client.player import Player, find_player
from omni_client.requests import SpeakSettings
from omni_client.types import Samples, SpeechChunk


def say(
    client: Client,
    text: str,
    *,
    output: str | None,
    format: str | None,
    model: str | None,
    stream: bool,
    settings: SpeakSettings,
) -> str:
    """Speak `text` and return a line of statistics. `output` None plays it, "-" is standard output."""
    if text == "-":
        text = sys.stdin.read()
    player = find_player() if output is None else None
    file_format = check_output(output, format)
    meter = Meter()
    with ExitStack() as ending:  # however it ends, the request is cancelled while the client is still connected
        if stream:
            chunks = meter.watch(ending.enter_context(client.speak(text, model=model, stream=True, **settings)))
        else:
            speech = client.speak(text, model=model, **settings)
            chunks = meter.watch([SpeechChunk(speech.audio, speech.sample_rate, 0, speech.text, speech.seed)])
        if player is not None:
            with Player(player) as playing:
                for chunk in chunks:
                    playing.push(chunk.audio, chunk.sample_rate)
        elif output == "-":
            write_stream(chunks, file_format)
        elif output is not None:
            write_file(Path(output), file_format, chunks)
    return meter.line()


def check_output(output: str | None, format: str | None) -> str:
    """The format to write: the one asked for, else the extension's, else wav. InvalidRequest for an unknown one."""
    if format is not None:
        check_format(format, "format")
        return format
    return "wav" if output in (None, "-") else format_of(str(output))


def write_stream(chunks: Iterable[SpeechChunk], format: str) -> None:
    """To standard output, each chunk as it comes."""
    if sys.stdout.isatty():
        raise InvalidRequest("audio is not written to a terminal: pipe it, or name a file with -o", param="output")
    encoder: Encoder | None = None
    for chunk in chunks:
        encoder = encoder or Encoder(format, chunk.sample_rate)
        sys.stdout.buffer.write(encoder.push(chunk.audio))
        sys.stdout.buffer.flush()
    if encoder is not None:
        sys.stdout.buffer.write(encoder.close())
        sys.stdout.buffer.flush()


def write_file(path: Path, format: str, chunks: Iterable[SpeechChunk]) -> None:
    """To a file which appears only when it is whole, with true sizes in its header."""
    parts = list(chunks)
    write_samples(path, format, np.concatenate([chunk.audio for chunk in parts]), parts[0].sample_rate)


def write_samples(path: Path, format: str, samples: Samples, sample_rate: int) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with ExitStack() as undo:
            undo.callback(part.unlink, missing_ok=True)
            part.write_bytes(encode(samples, sample_rate, format))
            part.replace(path)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", param="output") from error


class Meter:
    """First audio and real-time factor of a stream of chunks."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first: float | None = None
        self.spent = self.audio_seconds = 0.0

    def watch(self, chunks: Iterable[SpeechChunk]) -> Iterator[SpeechChunk]:
        for chunk in chunks:
            self.count(chunk.audio, chunk.sample_rate)
            yield chunk

    def count(self, audio: Samples, sample_rate: int | None) -> None:
        if not len(audio) or not sample_rate:
            return
        self.spent = time.perf_counter() - self.started
        self.first = self.spent if self.first is None else self.first
        self.audio_seconds += len(audio) / sample_rate

    def line(self) -> str:
        if self.first is None:
            return "no audio"
        return (
            f"first audio {self.first * 1000:.0f} ms, {self.audio_seconds:.2f} s of audio in {self.spent:.2f} s, "
            f"real-time factor {self.spent / self.audio_seconds:.3f}"
        )

"""Plays speech through a program that the machine has, while it is still being made."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from omni_runtime.errors import Internal, NotFound

from omni_client.encoder import encode, to_pcm16
from omni_client.types import Samples

# Programs that play raw s16le mono from their standard input at {rate} Hz.
_STREAMING = {
    "aplay": "-q -t raw -f S16_LE -c 1 -r {rate} -",
    "paplay": "--raw --format=s16le --channels=1 --rate={rate}",
    "ffplay": "-nodisp -autoexit -loglevel error -f s16le -ar {rate} -",
}
_FILE = "afplay"


def find_player() -> str:
    """The first player on PATH. NotFound says what to do without one."""
    for name in (*_STREAMING, _FILE):
        if shutil.which(name):
            return name
    raise NotFound(
        f"no player was found ({', '.join((*_STREAMING, _FILE))}): name a file with -o out.wav, or install one"
    )


class Player:
    """A player process that is fed samples. Leaving the `with` block waits until it was heard; an error ends it."""

    def __init__(self, program: str | None = None) -> None:
        self._program = program or find_player()
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: list[Samples] = []
        self._rate = 0

    def push(self, samples: Samples, sample_rate: int) -> None:
        self._rate = sample_rate
        if self._program == _FILE:
            self._kept.append(samples)
            return
        if self._process is None:
            options = _STREAMING[self._program].format(rate=sample_rate).split()
            self._process = subprocess.Popen([self._program, *options], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(to_pcm16(samples))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(self._process.wait()) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._process is not None:
            if kind is not None:
                self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()
            if kind is None and self._process.returncode:
                raise self._failed(self._process.returncode)
        elif self._kept and kind is None:
            import numpy as np

            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "speech.wav"
                path.write_bytes(encode(np.concatenate(self._kept), self._rate, "wav"))
                subprocess.run([self._program, str(path)], check=False)

    def _failed(self, code: int) -> Internal:
        return Internal(f"{self._program} ended with code {code}: name a file with -o out.wav")

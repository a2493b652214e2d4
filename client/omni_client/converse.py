"""`triton-omni chat`: one turn, or a conversation at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omni_runtime.errors import Internal, OmniError

from omni_client.client import Client
from omni_client.requests import ChatSettings
from omni_client.say import Meter, write_samples
from omni_client.types import ChatChunk, Samples


@dataclass
class Conversation:
    """The turns so far and how the next one is asked."""

    client: Client
    model: str | None
    settings: ChatSettings
    messages: list[Mapping[str, Any]] = field(default_factory=list)

    def turn(self, text: str | None, audio: Path | None = None, output: tuple[Path, str] | None = None) -> str:
        """Say `text` or `audio`, print the reply as it comes and remember both; a line of statistics.

        `output` is where the spoken reply goes, and its format. A turn that fails is forgotten.
        """
        if text is None and audio is not None:
            asked: list[Mapping[str, Any]] = list(self.messages)
        else:
            asked = [*self.messages, {"role": "user", "content": text or ""}]
        settings = self._settings(audio, output)
        meter = Meter()
        written: list[str] = []
        spoken: list[Samples] = []
        heard, rate = text or "", None
        source = _with_text(asked, text, audio)
        with self.client.chat(source, audio=audio, model=self.model, stream=True, **settings) as chunks:
            for chunk in chunks:
                if chunk.input_text:
                    heard = chunk.input_text
                    print(f"heard: {heard}", file=sys.stderr)
                written.append(chunk.text)
                print(chunk.text, end="", flush=True)
                rate = self._keep(chunk, spoken, meter) or rate
        print()
        self.messages += [{"role": "user", "content": heard}, {"role": "assistant", "content": "".join(written)}]
        if output is not None:
            if rate is None:
                raise Internal("the reply has no audio")
            write_samples(output[0], output[1], np.concatenate(spoken), rate)
        return meter.line() if rate is not None else ""

    def loop(self) -> None:
        """Turns from standard input until its end or `/quit`. Ctrl-C cancels a reply, and at the prompt leaves."""
        interactive = sys.stdin.isatty()
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return
            if line == "/quit":
                return
            if not line:
                continue
            try:
                self.turn(line)
            except KeyboardInterrupt:
                print("\ncancelled", file=sys.stderr)
            except OmniError as error:
                if not interactive:
                    raise
                print(f"error: {error}", file=sys.stderr)

    def _keep(self, chunk: ChatChunk, spoken: list[Samples], meter: Meter) -> int | None:
        if not len(chunk.audio):
            return None
        spoken.append(chunk.audio)
        meter.count(chunk.audio, chunk.sample_rate)
        return chunk.sample_rate

    def _settings(self, audio: Path | None, output: tuple[Path, str] | None) -> ChatSettings:
        if output is not None:
            return {**self.settings, "modalities": ["text", "audio"]}
        # Nobody would hear it: a pipeline that speaks is asked not to. Others do not know the setting.
        return {**self.settings, "modalities": ["text"]} if audio is not None else self.settings


def _with_text(asked: list[Mapping[str, Any]], text: str | None, audio: Path | None) -> list[Mapping[str, Any]]:
    """The messages, with a text and its clip in one user message when both are given."""
    if audio is None or text is None:
        return asked
    clip = {"type": "input_audio", "input_audio": {"tensor": "audio", "index": 0}}
    return [*asked[:-1], {"role": "user", "content": [{"type": "text", "text": text}, clip]}]

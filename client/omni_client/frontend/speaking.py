"""A pipeline's audio as bytes of an audio format, while it is made."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from omni_runtime.errors import Internal
from omni_runtime.kserve import Outputs, scalar

from omni_client.audio import Encoder, Samples
from omni_client.frontend.edge import in_thread

_UNCODED = ("wav", "pcm")


class Voicing:
    """Encodes the audio of one answer. The rate is the pipeline's, and is known with its first samples."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.sample_rate: int | None = None
        self.samples = 0
        self._encoder: Encoder | None = None

    def pieces(self, outputs: Outputs) -> list[Samples]:
        """The audio in `outputs`, in pieces that `push` encodes fast. Internal when samples are missing before it.

        A codec takes a while over a sentence; the client need not wait for its end.
        """
        audio = outputs.get("audio")
        if audio is None or (audio.size == 0 and "sample_rate" not in outputs):
            return []
        if "offset" in outputs and audio.size and scalar(outputs, "offset") != self.samples:
            raise Internal(f"audio is missing: {self.samples} samples came before offset {scalar(outputs, 'offset')}")
        self.sample_rate = self.sample_rate or int(scalar(outputs, "sample_rate"))
        self.samples += audio.size
        samples = audio.astype(np.float32, copy=False).reshape(-1)
        step = max(1, len(samples) if self.format in _UNCODED else self.sample_rate // 4)
        return [samples[start : start + step] for start in range(0, len(samples), step)]

    async def push(self, piece: Samples) -> bytes:
        """The bytes that `piece` completes, perhaps none."""
        if self._encoder is None:
            self._encoder = await in_thread(Encoder, self.format, self.sample_rate)
        return bytes(await in_thread(self._encoder.push, piece))

    async def close(self, empty: int | None = None) -> bytes:
        """The end of the file. When no audio came: a file of none at `empty` Hz, or Internal if that is not given."""
        if self._encoder is None:
            rate = self.sample_rate or empty
            if rate is None:
                raise Internal("the pipeline ended without audio")
            self._encoder = await in_thread(Encoder, self.format, rate)
        return bytes(await in_thread(self._encoder.close))


def audible(outputs: Outputs) -> bool:
    return "audio" in outputs and outputs["audio"].size > 0


def usage(outputs: Outputs) -> dict[str, Any] | None:
    """The pipeline's own account, which comes with its last response."""
    if "usage" not in outputs or not outputs["usage"].size:
        return None
    text = outputs["usage"].reshape(-1)[0]
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found

"""A pipeline's audio as bytes of an audio format, while it is made."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from omni_runtime.errors import Internal
from omni_runtime.kserve import Outputs, scalar

from omni_client.audio import Encoder
from omni_client.frontend.edge import in_thread


class Voicing:
    """Encodes the audio of one answer. The rate is the pipeline's, and is known with its first samples."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.sample_rate: int | None = None
        self.samples = 0
        self._encoder: Encoder | None = None

    async def push(self, outputs: Outputs) -> bytes:
        """The bytes that the audio in `outputs` (if any) completes. Internal when samples are missing before it."""
        audio = outputs.get("audio")
        if audio is None or (audio.size == 0 and "sample_rate" not in outputs):
            return b""
        if "offset" in outputs and audio.size and scalar(outputs, "offset") != self.samples:
            raise Internal(f"audio is missing: {self.samples} samples came before offset {scalar(outputs, 'offset')}")
        if self._encoder is None:
            self.sample_rate = int(scalar(outputs, "sample_rate"))
            self._encoder = await in_thread(Encoder, self.format, self.sample_rate)
        self.samples += audio.size
        return bytes(await in_thread(self._encoder.push, audio.astype(np.float32, copy=False).reshape(-1)))

    async def close(self, empty: int | None = None) -> bytes:
        """The end of the file. When no audio came: a file of none at `empty` Hz, or Internal if that is not given."""
        if self._encoder is None:
            if empty is None:
                raise Internal("the pipeline ended without audio")
            self._encoder = await in_thread(Encoder, self.format, empty)
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

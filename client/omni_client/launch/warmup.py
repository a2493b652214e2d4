"""One real request per pipeline, so that the first caller does not pay for what only a request warms."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from omni_runtime.kserve import Connection, Value

SENTENCE = "This is a test, and it is warm now."
_SPOKEN_FIRST = ("text_to_speech",)


def buzz(rate: int = 16_000, seconds: float = 1.0) -> npt.NDArray[np.float32]:
    """Something like a vowel, FP32 mono: what a recogniser is warmed with when nothing here can speak."""
    time = np.arange(int(rate * seconds)) / rate
    harmonics = sum(np.sin(2 * np.pi * 120 * k * time) / k for k in range(1, 20))
    return np.asarray(0.1 * harmonics, dtype=np.float32)


class Warmup:
    """Warms pipelines one by one; speech made by the first is what the others hear."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._audio: npt.NDArray[np.float32] = buzz()
        self._rate = 16_000

    @staticmethod
    def order(tasks: Mapping[str, str]) -> list[str]:
        """The pipelines of `tasks` (name to task): those that speak first."""
        return sorted(tasks, key=lambda name: tasks[name] not in _SPOKEN_FIRST)

    async def warm(self, pipeline: str, task: str) -> bool:
        """Whether the pipeline was asked; False for one whose task is not known here.

        Raises:
            OmniError: it failed.
        """
        inputs = self._inputs(task)
        if inputs is None:
            return False
        chunks = []
        async for outputs in self._connection.stream(pipeline, {**inputs, "stream": True}, timeout=300):
            if "audio" in outputs and outputs["audio"].size:
                chunks.append(outputs["audio"].reshape(-1))
                self._rate = int(outputs["sample_rate"].reshape(-1)[0])
        if chunks:
            self._audio = np.concatenate(chunks).astype(np.float32)
        return True

    def _inputs(self, task: str) -> dict[str, Value] | None:
        if task == "text_to_speech":
            return {"text": SENTENCE}
        if task == "transcription":
            return {"audio": self._audio, "audio_sample_rate": np.array([self._rate], dtype=np.int32)}
        if task == "chat":
            message = {"role": "user", "content": "Say hello."}
            return {"messages": json.dumps([message]), "params": json.dumps({"max_tokens": 8})}
        return None

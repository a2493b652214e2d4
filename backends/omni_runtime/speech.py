"""Pieces of text into speech through a one-shot stage: in order, with the next ones being made meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from omni_runtime import seeds
from omni_runtime.audio import Samples
from omni_runtime.errors import InvalidRequest
from omni_runtime.kserve import Outputs, scalar
from omni_runtime.metrics import TritonMetrics
from omni_runtime.params import Params
from omni_runtime.pool import Pool
from omni_runtime.request import Request

# How many sentences are being made ahead of the one that is delivered.
AHEAD = 2


class SpeechParams(Params):
    """Settings of a speaking pipeline."""

    speed: float = Field(default=1.0, ge=0.25, le=4.0)
    voice: str = "default"
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)


def check_voice(voice: str, voices: list[str]) -> str:
    """The name of a voice that the pipeline has; ``default`` is its first."""
    if voice == "default":
        return voices[0]
    if voice not in voices:
        raise InvalidRequest(f"there is no voice {voice!r}; there are: {', '.join(voices)}", param="voice")
    return voice


@dataclass(frozen=True)
class Spoken:
    """One piece of speech: ``audio`` [n] float32 at ``sample_rate`` Hz, beginning at sample ``offset`` of the whole."""

    text: str
    audio: Samples
    sample_rate: int
    offset: int
    input_tokens: int
    output_tokens: int


class Speaker:
    """Speaks the pieces of one request; ``offset`` counts its samples.

    Args:
        parent: the request; its end is the end of every call.
        pool: the stage that speaks.
        seed: the request's; each piece gets its own, by its number.
    """

    def __init__(
        self, parent: Request, pool: Pool, *, speed: float, seed: int, metrics: TritonMetrics | None = None
    ) -> None:
        self._parent = parent
        self._pool = pool
        self._speed = np.array([speed], np.float32)
        self._seed = seed
        self._metrics = metrics
        self.offset = 0

    async def speak(self, pieces: AsyncGenerator[str, None]) -> AsyncGenerator[Spoken, None]:
        """The speech of ``pieces`` in their order; up to AHEAD of them are in the works while one is delivered."""
        calls: asyncio.Queue[tuple[str, asyncio.Task[Outputs]] | BaseException | None] = asyncio.Queue(AHEAD)
        tasks: set[asyncio.Task[Outputs]] = set()

        async def submit() -> None:
            try:
                async with aclosing(pieces) as source:
                    index = 0
                    async for piece in source:
                        task = asyncio.create_task(self._call(piece, index))
                        tasks.add(task)
                        await calls.put((piece, task))
                        index += 1
            except Exception as error:
                await calls.put(error)
            else:
                await calls.put(None)

        submitter = asyncio.create_task(submit())
        try:
            while (entry := await calls.get()) is not None:
                if isinstance(entry, BaseException):
                    raise entry
                piece, call = entry
                yield self._spoken(piece, await call)
                tasks.discard(call)
        finally:
            # The caller may leave at any point: nothing that was begun for it goes on.
            for task in (submitter, *tasks):
                task.cancel()
            await asyncio.gather(submitter, *tasks, return_exceptions=True)

    async def _call(self, piece: str, index: int) -> Outputs:
        seed = np.array([seeds.split(self._seed, self._pool.stage, index)], np.int64)
        return await self._pool.infer(
            self._parent,
            {"text": piece, "speed": self._speed, "seed": seed},
            outputs=["audio", "sample_rate", "num_input_tokens", "num_output_tokens"],
        )

    def _spoken(self, piece: str, outputs: Outputs) -> Spoken:
        audio = outputs["audio"]
        spoken = Spoken(
            text=piece,
            audio=audio,
            sample_rate=scalar(outputs, "sample_rate"),
            offset=self.offset,
            input_tokens=scalar(outputs, "num_input_tokens"),
            output_tokens=scalar(outputs, "num_output_tokens"),
        )
        if self._metrics and not self.offset and len(audio):
            self._metrics.first_output(time.monotonic() - self._parent.started, "audio")
        self.offset += len(audio)
        return spoken

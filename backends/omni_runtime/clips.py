"""Spoken parts of chat messages: which tensor they are, and what was heard in them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_runtime import kserve
from omni_runtime.audio import Samples, check_rate, check_samples
from omni_runtime.errors import InvalidRequest
from omni_runtime.pool import Pool
from omni_runtime.request import Request

DEFAULT_RATE = 16_000
MAX_CLIPS = 16


@dataclass(frozen=True)
class Clip:
    audio: Samples
    rate: int


@dataclass(frozen=True)
class Heard:
    """``messages`` of text alone, and ``text``: all that was heard."""

    messages: list[dict[str, Any]]
    text: str


def read_clips(request: Request, max_seconds: int) -> list[Clip]:
    """The clips of the ``audio`` tensor: one, or as ``audio_lengths`` divides it.

    Raises:
        InvalidRequest: lengths that do not add up, too many clips or seconds, samples that are no audio.
    """
    if not request.has("audio"):
        for name in ("audio_lengths", "audio_sample_rate"):
            if request.has(name):
                raise InvalidRequest(f"{name} needs audio", param=name)
        return []
    rate = check_rate(int(request.scalar("audio_sample_rate", DEFAULT_RATE)))
    audio = check_samples(request.inputs["audio"], max_samples=max_seconds * rate)
    if not request.has("audio_lengths"):
        return [Clip(audio, rate)]
    lengths = request.inputs["audio_lengths"].reshape(-1)
    if len(lengths) > MAX_CLIPS:
        raise InvalidRequest(f"{len(lengths)} clips; at most {MAX_CLIPS} are taken", param="audio_lengths")
    if (lengths < 0).any() or int(lengths.sum()) != len(audio):
        raise InvalidRequest(f"audio_lengths must add up to the {len(audio)} samples of audio", param="audio_lengths")
    return [Clip(part, rate) for part in np.split(audio, np.cumsum(lengths)[:-1])]


async def hear(request: Request, recogniser: Pool, messages: list[dict[str, Any]], clips: list[Clip]) -> Heard:
    """``messages`` with each ``input_audio`` part replaced by what ``recogniser`` heard in its clip.

    Raises:
        InvalidRequest: a part that names no clip, a clip that no part names or in which nothing was said.
    """
    places = [
        (clip_index(part, where, len(clips)), where)
        for number, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for index, part in enumerate(message["content"])
        if isinstance(part, dict) and part.get("type") == "input_audio"
        for where in [f"messages[{number}].content[{index}]"]
    ]
    if unnamed := sorted(set(range(len(clips))) - {index for index, _ in places}):
        raise InvalidRequest(f"audio has a clip {unnamed[0]} that no message names", param="audio")
    texts = await asyncio.gather(*(_recognise(request, recogniser, clips[index]) for index, _ in places))
    for text, (_, where) in zip(texts, places, strict=True):
        if not text:
            raise InvalidRequest("nothing was heard in the audio", param=where)
    remaining = iter(texts)
    heard = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [
                {"type": "text", "text": next(remaining)}
                if isinstance(part, dict) and part.get("type") == "input_audio"
                else part
                for part in content
            ]
        heard.append({**message, "content": content})
    return Heard(heard, " ".join(texts))


def clip_index(part: dict[str, Any], where: str, clips: int) -> int:
    """Which clip an ``input_audio`` part is."""
    named = part.get("input_audio")
    index = named.get("index") if isinstance(named, dict) and named.get("tensor") == "audio" else None
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < clips:
        raise InvalidRequest(
            f'must name its clip as {{"tensor": "audio", "index": k}}, k < {clips}', param=f"{where}.input_audio"
        )
    return index


async def _recognise(request: Request, recogniser: Pool, clip: Clip) -> str:
    inputs: dict[str, kserve.Value] = {"audio": clip.audio, "audio_sample_rate": np.array([clip.rate], np.int32)}
    parts = []
    async with aclosing(recogniser.stream(request, inputs, outputs=["text"])) as answers:
        async for answer in answers:
            parts.append(kserve.text(answer, "text"))
    return "".join(parts).strip()

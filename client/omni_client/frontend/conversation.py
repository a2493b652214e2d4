"""The messages of a chat request as a pipeline's tensors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from typing import Any

import numpy as np
from omni_runtime.kserve import Value

from omni_client.frontend.catalog import Pipeline
from omni_client.frontend.edge import Edge
from omni_client.frontend.errors import ApiError, refused
from omni_client.frontend.schemas import InputAudio, Message, Part


async def tensors(edge: Edge, pipeline: Pipeline, messages: list[Message]) -> dict[str, Value]:
    """`messages`, and the clips in them end to end: `audio`, `audio_lengths`, `audio_sample_rate`."""
    clips: list[tuple[InputAudio, str]] = []
    written = [_message(message, f"messages[{k}]", clips) for k, message in enumerate(messages)]
    inputs: dict[str, Value] = {"messages": json.dumps(written, ensure_ascii=False)}
    if not clips:
        return inputs
    if "audio" not in pipeline.inputs:
        raise refused(f"{pipeline.name} does not hear audio", clips[0][1])
    rate = edge.settings.decoded_rate
    encoded = [(_bytes(clip, f"{path}.input_audio"), f"{path}.input_audio.data") for clip, path in clips]
    decoded = await asyncio.gather(
        *(edge.decoder.decode(data, sample_rate=rate, param=param) for data, param in encoded)
    )
    total = sum(len(samples) for samples, _ in decoded) / rate
    if total > edge.settings.max_audio_seconds:
        limit = f"the limit of {edge.settings.max_audio_seconds:g} s"
        raise ApiError(400, f"the audio of all messages is {total:.0f} s, {limit}", param="messages", code="too_long")
    inputs["audio"] = np.concatenate([samples for samples, _ in decoded])
    inputs["audio_lengths"] = np.array([len(samples) for samples, _ in decoded], np.int64)
    inputs["audio_sample_rate"] = np.array([rate], np.int32)
    return inputs


def _message(message: Message, path: str, clips: list[tuple[InputAudio, str]]) -> dict[str, Any]:
    # OpenAI's newer name for the same role; chat templates know the old one.
    role = "system" if message.role == "developer" else message.role
    if message.audio is not None:
        return {"role": role, "content": message.audio.transcript}
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    parts = [_part(part, f"{path}.content[{k}]", clips) for k, part in enumerate(message.content or [])]
    if all(part["type"] == "text" for part in parts):
        return {"role": role, "content": "\n".join(part["text"] for part in parts)}
    return {"role": role, "content": parts}


def _part(part: Part, path: str, clips: list[tuple[InputAudio, str]]) -> dict[str, Any]:
    if part.input_audio is None:
        return {"type": "text", "text": part.text}
    clips.append((part.input_audio, path))
    return {"type": "input_audio", "input_audio": {"tensor": "audio", "index": len(clips) - 1}}


def _bytes(clip: InputAudio, path: str) -> bytes:
    try:
        data = base64.b64decode(clip.data, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, f"{path}.data is not base64", param=f"{path}.data", code="invalid_value") from None
    formats = formats_of(data)
    if formats and clip.format not in formats:
        message = f"{path}.format is {clip.format}, but the data is {' or '.join(sorted(formats))}"
        raise ApiError(400, message, param=f"{path}.format", code="invalid_value")
    return data


def formats_of(data: bytes) -> set[str]:
    """What a file may be by its first bytes; empty when they tell nothing, and only decoding can."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return {"wav"}
    if data[:4] == b"OggS":
        return {"ogg", "opus"}
    if data[4:8] == b"ftyp":
        return {"m4a"}
    if data[:4] == b"\x1aE\xdf\xa3":
        return {"webm"}
    if data[:4] == b"fLaC":
        return {"flac"}
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        # The same sync word; the layer field is 0 in ADTS alone.
        return {"mp3"} if data[1] & 0x06 else {"aac"}
    return {"mp3", "aac", "flac"} if data[:3] == b"ID3" else set()

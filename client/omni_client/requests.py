"""What the SDK sends: keyword arguments to the tensors of a pipeline. No input or output happens here."""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from omni_runtime.errors import InvalidRequest
from omni_runtime.kserve import Value

from omni_client.types import Samples

if TYPE_CHECKING:
    from typing import TypeAlias

# A path, a file's bytes, or samples (float in [-1, 1] or int16) whose rate is given beside them.
Audio: TypeAlias = "str | os.PathLike[str] | bytes | NDArray[Any]"
Message: TypeAlias = "Mapping[str, Any]"
# What several clips of different rates are brought to: what recognisers listen at.
_COMMON_RATE = 16_000


class SpeakSettings(TypedDict, total=False):
    """`voice` (default: the pipeline's first), `speed` 0.25 to 4, `seed`."""

    voice: str | None
    speed: float | None
    seed: int | None


class TranscribeSettings(TypedDict, total=False):
    """`language`, `prompt` (words to expect), `temperature` 0 to 1, `word_timestamps`, `seed`."""

    language: str | None
    prompt: str | None
    temperature: float | None
    word_timestamps: bool | None
    seed: int | None


class ChatSettings(TypedDict, total=False):
    """Sampling, and for speaking pipelines `modalities` (["text"] or ["text", "audio"]), `voice` and `speed`."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: str | Sequence[str] | None
    seed: int | None
    logprobs: int | None
    ignore_eos: bool | None
    modalities: Sequence[str] | None
    voice: str | None
    speed: float | None


@dataclass(frozen=True, slots=True)
class Call:
    """A request before its pipeline is known; `audio` asks for one that takes or makes audio in a chat."""

    task: str
    inputs: Mapping[str, Value]
    audio: bool = False


def speak(text: str, settings: SpeakSettings, *, stream: bool) -> Call:
    """`text` to be spoken. InvalidRequest when it is not text."""
    if not isinstance(text, str):
        raise InvalidRequest(f"text must be a string, not {type(text).__name__}", param="text")
    return Call("text_to_speech", {"text": text, **_settings(settings, SpeakSettings, stream)})


def transcribe(audio: Audio, sample_rate: int | None, settings: TranscribeSettings, *, stream: bool) -> Call:
    """A recording to be recognised; a path or bytes are decoded here."""
    samples, rate = samples_of(audio, sample_rate)
    inputs: dict[str, Value] = {"audio": samples, "audio_sample_rate": np.array([rate], np.int32)}
    return Call("transcription", {**inputs, **_settings(settings, TranscribeSettings, stream)})


def chat(
    messages: str | Sequence[Message],
    audio: Audio | Sequence[Audio] | None,
    sample_rate: int | None,
    settings: ChatSettings,
    *,
    stream: bool,
) -> Call:
    """A conversation to be continued.

    A string is one user message. `audio` is spoken input: clips that parts of the messages name by index
    ({"type": "input_audio", "input_audio": {"tensor": "audio", "index": 0}}), else a user message after the others.
    OpenAI's parts with base64 `data` are decoded.
    """
    turns = [dict(message) for message in messages] if not isinstance(messages, str) else []
    if isinstance(messages, str) and (messages or audio is None):
        turns.append({"role": "user", "content": messages})
    clips = [samples_of(clip, sample_rate) for clip in _clips(audio)]
    inlined = [_inline(turn, clips if audio is None else None) for turn in turns]
    if audio is not None and not any(_names_a_clip(turn) for turn in inlined):
        parts = [_part(index) for index in range(len(clips))]
        if isinstance(messages, str) and inlined:
            inlined[-1] = {"role": "user", "content": [{"type": "text", "text": messages}, *parts]}
        else:
            inlined.append({"role": "user", "content": parts})
    inputs: dict[str, Value] = {"messages": json.dumps(inlined, ensure_ascii=False)}
    if clips:
        joined, lengths, rate = _join(clips)
        inputs |= {"audio": joined, "audio_lengths": lengths, "audio_sample_rate": np.array([rate], np.int32)}
    needs_audio = bool(clips) or "audio" in (settings.get("modalities") or ()) or bool(settings.get("voice"))
    return Call("chat", {**inputs, **_settings(settings, ChatSettings, stream)}, audio=needs_audio)


def samples_of(audio: Audio, sample_rate: int | None, *, param: str = "audio") -> tuple[Samples, int]:
    """(mono float32 [n], rate) of a path, a file's bytes or samples [n]; InvalidRequest names what is wrong."""
    if not isinstance(audio, np.ndarray):
        from omni_client.decoder import decode

        if sample_rate is not None:
            raise InvalidRequest("a file states its own sample rate; give one only with samples", param="sample_rate")
        return decode(audio, param=param)
    if sample_rate is None:
        raise InvalidRequest("samples need their sample_rate", param="sample_rate")
    if audio.ndim != 1 or audio.size == 0:
        raise InvalidRequest(f"samples must be mono, of shape [n], not {list(audio.shape)}", param=param)
    if audio.dtype == np.int16:
        return (audio / np.float32(32768)).astype(np.float32), sample_rate
    if audio.dtype.kind != "f":
        raise InvalidRequest(f"samples must be floats in [-1, 1] or int16, not {audio.dtype}", param=param)
    return audio.astype(np.float32, copy=False), sample_rate


def _settings(settings: Mapping[str, Any], known: type, stream: bool) -> dict[str, Value]:
    if unknown := sorted(settings.keys() - known.__annotations__.keys()):
        raise InvalidRequest(f"there is no setting {unknown[0]!r}", param=unknown[0])
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number, not {value}", param=name)
    return {"params": json.dumps(given), "stream": stream}


def _clips(audio: Audio | Sequence[Audio] | None) -> list[Audio]:
    if audio is None:
        return []
    return list(audio) if isinstance(audio, list | tuple) else [audio]  # type: ignore[list-item]


def _inline(turn: dict[str, Any], clips: list[tuple[Samples, int]] | None) -> dict[str, Any]:
    """The message with its base64 parts moved into `clips`."""
    if not isinstance(turn.get("content"), list):
        return turn
    return turn | {"content": [_without_data(part, clips) for part in turn["content"]]}


def _without_data(part: Any, clips: list[tuple[Samples, int]] | None) -> Any:
    if not isinstance(part, dict) or part.get("type") != "input_audio" or "data" not in part.get("input_audio", {}):
        return part
    if clips is None:
        raise InvalidRequest("give audio either as an argument or inside the messages, not as both", param="audio")
    try:
        data = base64.b64decode(part["input_audio"]["data"], validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidRequest("input_audio.data is not base64", param="messages") from None
    clips.append(samples_of(data, None, param="messages"))
    return _part(len(clips) - 1)


def _part(index: int) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"tensor": "audio", "index": index}}


def _names_a_clip(turn: Mapping[str, Any]) -> bool:
    content = turn.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") == "input_audio" for part in content
    )


def _join(clips: list[tuple[Samples, int]]) -> tuple[Samples, NDArray[np.int64], int]:
    """The clips in a row at one rate, their lengths in samples, the rate."""
    rates = {rate for _, rate in clips}
    rate = rates.pop() if len(rates) == 1 else _COMMON_RATE
    if rates:
        import soxr

        clips = [(soxr.resample(samples, source, rate), rate) for samples, source in clips]
    lengths = np.array([len(samples) for samples, _ in clips], np.int64)
    return np.concatenate([samples for samples, _ in clips]), lengths, rate

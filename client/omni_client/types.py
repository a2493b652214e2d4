"""What the SDK returns. Audio is float32 [n], mono, in [-1, 1]; rates are in Hz, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from os import PathLike

Samples = NDArray[np.float32]


def silence() -> Samples:
    """Audio of no samples."""
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request consumed: tokens in and out, and for a transcription the seconds of audio."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SpeechChunk:
    """A piece of speech that begins at sample `offset` of the whole and says `text`."""

    audio: Samples
    sample_rate: int
    offset: int
    text: str
    seed: int
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """Text as speech."""

    audio: Samples
    sample_rate: int
    text: str
    seed: int
    usage: Usage | None = None

    @property
    def duration(self) -> float:
        """Seconds of audio."""
        return len(self.audio) / self.sample_rate

    def encode(self, format: str = "wav") -> bytes:
        """The bytes of an audio file: wav, pcm, flac, mp3, opus or aac."""
        from omni_client import encoder

        return encoder.encode(self.audio, self.sample_rate, format)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file in the format that its extension names."""
        from omni_client import encoder

        path = Path(path)
        path.write_bytes(self.encode(encoder.format_of(path)))


@dataclass(frozen=True, slots=True)
class Word:
    """A recognised word and when it was said."""

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech and what was recognised in it."""

    id: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: tuple[Word, ...] | None = None


@dataclass(frozen=True, slots=True)
class TranscriptChunk:
    """What was recognised since the last chunk."""

    text: str
    segments: tuple[Segment, ...] = ()
    language: str = ""
    duration: float | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a recording of `duration` seconds."""

    text: str
    segments: tuple[Segment, ...] = ()
    language: str = ""
    duration: float | None = None
    usage: Usage | None = None

    def srt(self) -> str:
        """As SubRip subtitles."""
        from omni_client import subtitles

        return subtitles.srt(self.segments)

    def vtt(self) -> str:
        """As WebVTT subtitles."""
        from omni_client import subtitles

        return subtitles.vtt(self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class ChatChunk:
    """A piece of a reply: text, or audio that begins at sample `offset`, or both.

    `finish_reason` is empty until the end. `input_text` is what was heard in spoken input, on the first chunk.
    `logprobs` has an entry per token: token id to logprob, rank and decoded_token.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str = ""
    audio: Samples = field(default_factory=silence)
    sample_rate: int | None = None
    offset: int | None = None
    input_text: str | None = None
    seed: int | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A whole reply; fields as in ChatChunk."""

    text: str
    finish_reason: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()
    audio: Samples = field(default_factory=silence)
    sample_rate: int | None = None
    input_text: str | None = None
    seed: int | None = None
    usage: Usage | None = None

    def speech(self) -> Speech | None:
        """The spoken reply, if there is one."""
        if self.sample_rate is None or not len(self.audio):
            return None
        return Speech(self.audio, self.sample_rate, self.text, self.seed or 0, self.usage)


@dataclass(frozen=True, slots=True)
class Model:
    """A pipeline that a server has loaded. `ready` means that its stages are, too; `audio` that it takes audio."""

    name: str
    task: str
    ready: bool
    voices: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    audio: bool = False

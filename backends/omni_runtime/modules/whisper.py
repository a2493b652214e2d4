"""Whisper on CTranslate2: up to 30 s of 16 kHz speech to text, with times for segments and words.

Decoding is a beam search without sampling: CTranslate2 draws from a generator of its own threads, which a request's
seed could not reach.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from faster_whisper import WhisperModel

from omni_runtime.audio import check_samples
from omni_runtime.config import StageConfig
from omni_runtime.errors import InvalidRequest
from omni_runtime.kserve import Value
from omni_runtime.module import request_of
from omni_runtime.request import Request

SAMPLE_RATE = 16_000
MAX_SAMPLES = 30 * SAMPLE_RATE
MAX_PROMPT = 1_000


class WhisperModule:
    """In: ``audio`` FP32[n <= 480000], ``prompt`` BYTES[1], ``word_timestamps`` BOOL[1]. Out: ``text`` BYTES[1],
    ``segments`` BYTES[1] JSON (times in seconds from the start of ``audio``), ``language`` BYTES[1]."""

    engine = "ctranslate2"
    device = "cpu"

    def __init__(self, config: StageConfig) -> None:
        self._language = str(config.arguments.get("language", "en"))
        self._beam = int(config.arguments.get("beam_size", 5))
        self._model = WhisperModel(
            str(config.version_dir),
            device="cpu",
            compute_type=str(config.arguments.get("compute_type", "int8")),
            cpu_threads=int(config.arguments.get("threads", 2)),
        )

    def __call__(self, request: Request) -> Mapping[str, Value]:
        if not request.has("audio"):
            raise InvalidRequest("audio is required", param="audio")
        audio = check_samples(request.inputs["audio"], max_samples=MAX_SAMPLES)
        prompt = request.text("prompt", "")
        if len(prompt) > MAX_PROMPT:
            raise InvalidRequest(f"prompt has {len(prompt)} characters; at most {MAX_PROMPT} are taken", param="prompt")
        segments: list[dict[str, Any]] = []
        if len(audio):
            found, _ = self._model.transcribe(
                audio,
                language=self._language,
                beam_size=self._beam,
                temperature=0.0,
                condition_on_previous_text=False,
                initial_prompt=prompt or None,
                word_timestamps=bool(request.scalar("word_timestamps", False)),
            )
            segments = [_segment(each, len(audio) / SAMPLE_RATE) for each in found]
        return {
            "text": "".join(each["text"] for each in segments),
            "segments": json.dumps(segments),
            "language": self._language,
        }

    def warm_up(self) -> None:
        noise = np.random.default_rng(0).standard_normal(SAMPLE_RATE, dtype=np.float32) * 0.1
        self(request_of({"audio": noise}))


def _segment(segment: Any, duration: float) -> dict[str, Any]:
    fields = {
        "start": round(min(segment.start, duration), 3),
        "end": round(min(segment.end, duration), 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
    if segment.words is not None:
        fields["words"] = [
            {
                "word": word.word,
                "start": round(min(float(word.start), duration), 3),
                "end": round(min(float(word.end), duration), 3),
                "probability": float(word.probability),
            }
            for word in segment.words
        ]
    return fields


def load(config: StageConfig) -> WhisperModule:
    return WhisperModule(config)

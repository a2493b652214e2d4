"""hibari: English text to 24 kHz speech in one pass (int8 ONNX; the phonemes come from its own G2P).

The network is quantised with dynamic scales, so an item's output depends on what shares its batch: one item a call.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from hibari import Hibari

from omni_runtime import seeds
from omni_runtime.config import StageConfig
from omni_runtime.errors import InvalidRequest
from omni_runtime.kserve import Value
from omni_runtime.module import request_of
from omni_runtime.request import Request

MIN_SPEED, MAX_SPEED = 0.25, 4.0
# What one call may be asked to speak; the pipeline sends a sentence.
MAX_CHARACTERS = 4_000


class HibariModule:
    """In: ``text`` BYTES[1], ``speed`` FP32[1], ``seed`` INT64[1]. Out: ``audio`` FP32[n] in [-1, 1], ``sample_rate``,
    ``seed``, ``num_input_tokens`` (phonemes) and ``num_output_tokens`` (frames of 12.5 ms)."""

    engine = "onnxruntime"
    device = "cpu"
    frame = 300

    def __init__(self, config: StageConfig) -> None:
        threads = int(config.arguments.get("threads", 1))
        self._tts = Hibari(model=str(config.version_dir / "hibari.onnx"), threads=threads)

    def __call__(self, request: Request) -> Mapping[str, Value]:
        text = request.text("text")
        if not text.strip():
            raise InvalidRequest("text is empty", param="text")
        if len(text) > MAX_CHARACTERS:
            raise InvalidRequest(f"text has {len(text)} characters; a call takes {MAX_CHARACTERS}", param="text")
        speed = float(request.scalar("speed", 1.0))
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(f"speed must be between {MIN_SPEED} and {MAX_SPEED}, not {speed:g}", param="speed")
        seed = request.scalar("seed")
        seed = seeds.draw() if seed is None else int(seed)
        parts, tokens = [np.zeros(0, np.float32)], 0
        for index, phonemes in enumerate(self._tts.phonemize(text)):
            ids = self._tts.ids(phonemes)
            tokens += len(ids)
            parts.append(self._tts.from_ids(ids, speed, np.random.default_rng(seeds.split(seed, index))))
        audio = np.clip(np.concatenate(parts), -1.0, 1.0)
        return {
            "audio": audio,
            "sample_rate": np.array([self._tts.sample_rate], np.int32),
            "seed": np.array([seed], np.int64),
            "num_input_tokens": np.array([tokens], np.int32),
            "num_output_tokens": np.array([len(audio) // self.frame], np.int32),
        }

    def warm_up(self) -> None:
        for text in ("Warm.", "A sentence of ordinary length, so that no buffer is still to be made."):
            self(request_of({"text": text}))


def load(config: StageConfig) -> HibariModule:
    return HibariModule(config)

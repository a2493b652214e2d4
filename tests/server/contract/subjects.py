"""What the contract is tried on: every stage and pipeline, with a request that is short and one that is long.

A stage that is added later is covered by one more entry.
"""

import json
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soxr

SENTENCE = "The quick brown fox jumps over the lazy dog."
HEARD = 16_000
SPEECH = Path(__file__).parents[2] / "data" / "question.wav"


@dataclass(frozen=True)
class Subject:
    """One model. ``compare`` names the outputs of ``short`` and how far they may differ (0: not at all); ``long`` runs
    for seconds; ``bad`` maps a field to inputs that are refused with its name."""

    name: str
    short: Mapping[str, Any]
    compare: Mapping[str, float]
    facts: tuple[str, ...] = ()
    long: Mapping[str, Any] | None = None
    bad: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    seeded: bool = False
    others: tuple[Mapping[str, Any], ...] = ()
    joined: tuple[str, ...] = field(default=())

    @property
    def decoupled(self) -> bool:
        return self.long is not None

    def __str__(self) -> str:
        return self.name


def params(**values):
    return json.dumps(values)


def number(value, kind):
    return np.array([value], kind)


@cache
def speech(rate=HEARD):
    """A spoken question, [n] float32 at ``rate``."""
    with wave.open(str(SPEECH)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32_768
        return soxr.resample(samples, file.getframerate(), rate).astype(np.float32)


def subjects():
    heard = {"audio": speech(), "audio_sample_rate": number(HEARD, np.int32)}
    long_speech = np.tile(np.concatenate([speech(), np.zeros(3 * HEARD, np.float32)]), 30)
    greedy = {"temperature": 0.0, "max_tokens": 24, "seed": 5}
    sampled = {"temperature": 1.0, "max_tokens": 24, "seed": 5}
    endless = {"temperature": 1.0, "max_tokens": 1_500, "ignore_eos": True, "seed": 1}
    asked = json.dumps([{"role": "user", "content": "Name three colours."}])
    other = json.dumps([{"role": "user", "content": "Tell me a very short story about a lighthouse and a whale."}])
    chat_bad = (
        ("messages", {"messages": "not json"}),
        ("messages", {"messages": "[]"}),
        ("messages", {}),
        ("temperature", {"messages": asked, "params": params(temperature=-1)}),
        ("nonsense", {"messages": asked, "params": params(nonsense=1)}),
        ("params", {"messages": asked, "params": "{"}),
        ("stream", {"messages": asked, "stream": np.array([True, True])}),
    )
    return [
        Subject(
            "hibari_tts",
            short={"text": SENTENCE, "seed": number(3, np.int64)},
            compare={"audio": 1e-5},
            facts=("sample_rate", "seed", "num_output_tokens"),
            others=({"text": "Something quite different is being said here.", "seed": number(4, np.int64)},),
            seeded=True,
            bad=(
                ("text", {}),
                ("text", {"text": "  "}),
                ("speed", {"text": SENTENCE, "speed": number(0, np.float32)}),
                ("speed", {"text": SENTENCE, "speed": number(np.nan, np.float32)}),
                ("control", {"control": "dance"}),
            ),
        ),
        Subject(
            "silero_vad",
            short={"audio": speech()[: 40 * 512]},
            compare={"probability": 1e-5, "state": 1e-5},
            facts=("frame_length", "sample_rate"),
            others=({"audio": np.zeros(16_000, np.float32)},),
            bad=(
                ("audio", {}),
                ("audio", {"audio": np.array([np.nan], np.float32)}),
                ("state", {"audio": np.zeros(512, np.float32), "state": np.full((2, 128), np.inf, np.float32)}),
            ),
        ),
        Subject(
            "whisper_tiny_en",
            short={"audio": speech()},
            compare={"text": 0, "segments": 0},
            facts=("language",),
            others=({"audio": speech()[::-1].copy()},),
            bad=(
                ("audio", {}),
                ("audio", {"audio": np.zeros(31 * HEARD, np.float32)}),
                ("audio", {"audio": np.array([np.inf], np.float32)}),
                ("prompt", {"audio": speech(), "prompt": "x" * 1_001}),
            ),
        ),
        Subject(
            "smollm2_135m",
            short={"messages": asked, "sampling_parameters": params(**sampled)},
            compare={"token_ids": 0, "text_output": 0, "finish_reason": 0},
            facts=("finish_reason", "num_input_tokens", "num_output_tokens"),
            others=(
                {"messages": other, "sampling_parameters": params(**sampled)},
                {"text_input": "One, two, three,", "sampling_parameters": params(**greedy)},
            ),
            seeded=True,
            long={"messages": asked, "sampling_parameters": params(**endless)},
            joined=("text_output", "token_ids"),
            bad=(
                ("temperature", {"text_input": "Hi", "sampling_parameters": params(temperature="hot")}),
                ("nonsense", {"text_input": "Hi", "sampling_parameters": params(nonsense=1)}),
                ("sampling_parameters", {"text_input": "Hi", "sampling_parameters": "{"}),
                ("stream", {"text_input": "Hi", "stream": np.array([True, True])}),
                ("text_input", {}),
            ),
        ),
        Subject(
            "hibari",
            short={"text": f"{SENTENCE} And it does so twice. Then it rests.", "params": params(seed=3)},
            compare={"audio": 1e-5, "text": 0},
            facts=("sample_rate", "offset", "seed", "usage"),
            others=({"text": "Other words. In other sentences.", "params": params(seed=4)},),
            seeded=True,
            long={"text": f"{SENTENCE} " * 300},
            joined=("audio", "text"),
            bad=(
                ("text", {}),
                ("text", {"text": ""}),
                ("text", {"text": " \n\t"}),
                ("text", {"text": "x" * 100_000}),
                ("text", {"text": "\U0001f389\U0001f389"}),
                ("speed", {"text": SENTENCE, "params": params(speed=0)}),
                ("voice", {"text": SENTENCE, "params": params(voice="nobody")}),
                ("nonsense", {"text": SENTENCE, "params": params(nonsense=1)}),
                ("params", {"text": SENTENCE, "params": "[]"}),
            ),
        ),
        Subject(
            "whisper",
            short={**heard, "params": params(word_timestamps=True)},
            compare={"text": 0, "segments": 0},
            facts=("language", "audio_duration", "usage"),
            others=({"audio": np.zeros(48_000, np.float32), "audio_sample_rate": number(48_000, np.int32)},),
            long={"audio": long_speech, "audio_sample_rate": number(HEARD, np.int32)},
            joined=("text", "segments"),
            bad=(
                ("audio", {}),
                ("audio", {"audio": np.array([np.nan], np.float32)}),
                ("audio_sample_rate", {"audio": speech(), "audio_sample_rate": number(3_999, np.int32)}),
                ("audio_sample_rate", {"audio": speech(), "audio_sample_rate": number(384_001, np.int32)}),
                ("temperature", {**heard, "params": params(temperature=0.7)}),
                ("language", {**heard, "params": params(language="xx")}),
                ("nonsense", {**heard, "params": params(nonsense=1)}),
            ),
        ),
        Subject(
            "smollm2",
            short={"messages": asked, "params": params(**sampled)},
            compare={"token_ids": 0, "text": 0, "finish_reason": 0},
            facts=("finish_reason", "usage", "seed"),
            others=({"messages": other, "params": params(**sampled)}, {"text": "Once", "params": params(**greedy)}),
            seeded=True,
            long={"messages": asked, "params": params(**endless)},
            joined=("text", "token_ids"),
            bad=(*chat_bad, ("text", {"text": ""}), ("text", {"text": "word " * 20_000})),
        ),
        Subject(
            "voice_chat",
            short={**heard, "params": params(**sampled)},
            compare={"token_ids": 0, "text": 0, "input_text": 0, "audio": 1e-5},
            facts=("sample_rate", "finish_reason", "usage", "seed"),
            others=({"messages": other, "params": params(**sampled)},),
            seeded=True,
            long={"messages": asked, "params": params(**endless)},
            joined=("text", "token_ids", "audio"),
            bad=(
                ("temperature", {"messages": asked, "params": params(temperature=-1)}),
                ("modalities", {"messages": asked, "params": params(modalities=["smell"])}),
                ("voice", {"messages": asked, "params": params(voice="nobody")}),
                ("audio_lengths", {**heard, "audio_lengths": np.array([1, 2])}),
                ("audio_lengths", {"messages": asked, "audio_lengths": np.array([1])}),
                ("audio_sample_rate", {"messages": asked, "audio_sample_rate": number(HEARD, np.int32)}),
                ("audio", {**heard, "messages": asked}),
                ("audio", {**heard, "audio_lengths": np.array([HEARD, len(speech()) - HEARD])}),
                ("messages", {"messages": "[]"}),
                ("text", {}),
                ("text", {"text": " \n"}),
            ),
        ),
    ]

"""A spoken question to a spoken answer: when the first audio comes, against when the whole answer is there."""

from __future__ import annotations

import json
import time
from contextlib import aclosing

import numpy as np
from omni_runtime.kserve import Connection, Value, text

from omni_client.bench.figures import Figure, figure, ratio

QUESTION = "Can you tell me something about the ocean?"
SETTINGS = {"max_tokens": 96, "temperature": 0.0, "seed": 1}


async def measure(connection: Connection, rounds: int) -> list[Figure]:
    question: dict[str, Value] = {"text": QUESTION, "params": json.dumps({"seed": 2})}
    (spoken,) = [chunk async for chunk in connection.stream("hibari", question)]
    inputs: dict[str, Value] = {
        "audio": spoken["audio"],
        "audio_sample_rate": spoken["sample_rate"],
        "params": json.dumps(SETTINGS),
        "stream": True,
    }
    heard, first, last_text, whole = [], [], [], []
    for number in range(rounds + 1):
        start = time.perf_counter()
        times: dict[str, float] = {}
        async with aclosing(connection.stream("voice_chat", inputs)) as chunks:
            async for chunk in chunks:
                now = time.perf_counter() - start
                times.setdefault("heard", now)
                if "audio" in chunk and np.size(chunk["audio"]):
                    times.setdefault("audio", now)
                if "text" in chunk and text(chunk, "text"):
                    times["text"] = now
        times["whole"] = time.perf_counter() - start
        if number:
            heard.append(1e3 * times["heard"])
            first.append(1e3 * times["audio"])
            last_text.append(1e3 * times["text"])
            whole.append(1e3 * times["whole"])
    return [
        figure("voice, question understood", heard, "ms"),
        figure("voice, first audio", first, "ms"),
        figure("voice, last word written", last_text, "ms"),
        figure("voice, whole answer", whole, "ms"),
        ratio("voice, first audio / whole answer", first, whole, at_most=1.0),
    ]

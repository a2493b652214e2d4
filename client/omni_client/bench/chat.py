"""Chat: tokens a second of the engine in this process, of the served pipeline, and of eight requests at once."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from omni_runtime.kserve import Connection, Value

from omni_client.bench.figures import Figure, figure, ratio

PROMPT = "Write about the sea."
TOKENS = 64
SETTINGS = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
TOGETHER = 8


class Direct:
    """The engine of the stage, without a server around it."""

    def __init__(self, stage: Path) -> None:
        # As omni_ar sets it, and before torch is loaded.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        from omni_runtime.ar.engine import build

        self._engine: Any = build("torch", stage, json.loads((stage / "model.json").read_text()))

    async def generate(self) -> float:
        """Tokens a second of one request."""
        from omni_runtime.ar.messages import Prompt
        from omni_runtime.ar.sampling import Sampling

        start, tokens = time.perf_counter(), 0
        sampling = Sampling.parse({**SETTINGS, "seed": 0})
        async with aclosing(self._engine.generate(Prompt(text=PROMPT), sampling, "bench")) as deltas:
            async for delta in deltas:
                tokens += len(delta.token_ids)
        return tokens / (time.perf_counter() - start)

    async def close(self) -> None:
        await self._engine.close()


async def served(connection: Connection, seed: int = 0) -> tuple[int, float]:
    """Tokens, and seconds to the first of them, of one request to the pipeline."""
    start, tokens, first = time.perf_counter(), 0, 0.0
    inputs: dict[str, Value] = {"text": PROMPT, "stream": True, "params": json.dumps({**SETTINGS, "seed": seed})}
    async with aclosing(connection.stream("smollm2", inputs, outputs=["token_ids"])) as chunks:
        async for chunk in chunks:
            first = first or time.perf_counter() - start
            tokens += len(chunk["token_ids"])
    return tokens, first


async def measure(connection: Connection, stage: Path, rounds: int) -> list[Figure]:
    direct = Direct(stage)
    bare, alone, together, first = [], [], [], []
    for number in range(rounds + 1):
        speed = await direct.generate()
        start = time.perf_counter()
        tokens, begun = await served(connection)
        one = tokens / (time.perf_counter() - start)
        start = time.perf_counter()
        many = await asyncio.gather(*(served(connection, seed) for seed in range(TOGETHER)))
        eight = sum(count for count, _ in many) / (time.perf_counter() - start)
        if number:  # the first round warms
            bare.append(speed)
            alone.append(one)
            together.append(eight)
            first.append(1e3 * begun)
    await direct.close()
    return [
        figure("chat, engine alone: 1 request", bare, "tok/s"),
        figure("chat, served: 1 request", alone, "tok/s"),
        figure(f"chat, served: {TOGETHER} requests", together, "tok/s"),
        figure("chat, served: first token", first, "ms"),
        ratio("chat, served / engine: 1 request", alone, bare, at_least=0.95),
        ratio(f"chat, served: {TOGETHER} requests / 1", together, alone, at_least=3.0),
    ]

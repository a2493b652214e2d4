"""Speech: the synthesiser in this process, against the same text through gRPC and through the frontend."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from pathlib import Path

import httpx
from omni_runtime.kserve import Connection, Value
from omni_runtime.sentences import split_sentences

from omni_client.bench.figures import Figure, figure, ratio

TEXT = (
    "The old lighthouse keeper climbed the stairs every evening at sunset. He carried a lantern, a book, and a small "
    "loaf of bread. From the top he could see the fishing boats coming home, one after the other. On stormy nights "
    "the waves reached the windows, and the whole tower seemed to sing. Ships from 12 countries knew his light. "
    "When he was too old to climb, the village built him a house from which he could see it turn."
)


class Timed:
    """Seconds to the first audio and to the end of one synthesis, and the seconds of audio that it made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.first = self.total = self.audio = 0.0

    def heard(self, seconds: float) -> None:
        self.first = self.first or time.perf_counter() - self._start
        self.audio += seconds

    def end(self) -> Timed:
        self.total = time.perf_counter() - self._start
        return self


class Direct:
    """hibari in this process, sentence by sentence as the pipeline does it."""

    def __init__(self, weights: Path) -> None:
        from hibari import Hibari

        self._tts = Hibari(model=str(weights))

    def speak(self) -> Timed:
        timed = Timed()
        for sentence in split_sentences(TEXT):
            timed.heard(len(self._tts(sentence, seed=0)) / self._tts.sample_rate)
        return timed.end()


async def over_grpc(connection: Connection) -> Timed:
    timed = Timed()
    inputs: dict[str, Value] = {"text": TEXT, "stream": True, "params": json.dumps({"seed": 0})}
    async with aclosing(connection.stream("hibari", inputs, outputs=["audio", "sample_rate"])) as chunks:
        async for chunk in chunks:
            timed.heard(len(chunk["audio"]) / int(chunk["sample_rate"][0]))
    return timed.end()


async def over_http(client: httpx.AsyncClient) -> Timed:
    timed = Timed()
    body = {"model": "hibari", "input": TEXT, "response_format": "pcm", "seed": 0}
    async with client.stream("POST", "audio/speech", json=body) as response:
        response.raise_for_status()
        async for data in response.aiter_bytes():
            timed.heard(len(data) / 2 / 24_000)
    return timed.end()


async def measure(connection: Connection, client: httpx.AsyncClient, weights: Path, rounds: int) -> list[Figure]:
    direct = Direct(weights)
    runs: list[tuple[Timed, Timed, Timed]] = []
    for _ in range(rounds + 1):
        runs.append((direct.speak(), await over_grpc(connection), await over_http(client)))
    # The first round warms what each of the three keeps open.
    bare, grpc, http = (list(column) for column in zip(*runs[1:], strict=True))
    extra = [one.first - own.first for one, own in zip(grpc, bare, strict=True)]
    first = figure("first audio over gRPC, beyond the first sentence's own time", [1e3 * each for each in extra], "ms")
    return [
        figure("speech, direct: total", [1e3 * each.total for each in bare], "ms"),
        figure("speech, direct: first sentence", [1e3 * each.first for each in bare], "ms"),
        figure("speech, gRPC: first audio", [1e3 * each.first for each in grpc], "ms"),
        figure("speech, frontend: first audio", [1e3 * each.first for each in http], "ms"),
        figure("speech, gRPC: real-time factor", [each.total / each.audio for each in grpc], ""),
        Figure(first.name, first.p50, first.p99, first.unit, first.count, "<= 20", first.p50 <= 20),
        ratio("speech, gRPC / direct: total", _totals(grpc), _totals(bare), at_most=1.15),
        ratio("speech, frontend / direct: total", _totals(http), _totals(bare), at_most=1.15),
    ]


def _totals(runs: list[Timed]) -> list[float]:
    return [each.total for each in runs]

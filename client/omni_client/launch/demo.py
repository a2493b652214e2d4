"""`triton-omni demo`: a real server speaks a sentence, reads it back, and answers a spoken question by voice."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from omni_runtime.errors import OmniError

from omni_client.aio import AsyncClient
from omni_client.launch.progress import Display
from omni_client.launch.serve import ServeOptions, Stop, first, prepare
from omni_client.launch.stack import Stack

SENTENCE = (
    "Hello, and welcome to Triton. This sentence was spoken by a real inference server. "
    "While you hear the first words, the server is still making the last ones."
)
QUESTION = "What is the capital of France?"
WER_LIMIT = 0.10


@dataclass
class Recording:
    """A wav file that grows while its chunks arrive, and when they did."""

    path: Path
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    """Seconds from the request to the first audio."""
    took: float = 0.0
    """Seconds from the request to the last audio."""
    samples: int = 0
    rate: int = 0
    chunks: list[npt.NDArray[np.float32]] = field(default_factory=list)
    _file: wave.Wave_write | None = None

    def add(self, audio: npt.NDArray[np.float32], rate: int) -> None:
        """Write FP32 mono samples in [-1, 1] as 16-bit ones."""
        if not audio.size:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = wave.open(str(self.path), "wb")  # noqa: SIM115 - it stays open between chunks
            self._file.setnchannels(1)
            self._file.setsampwidth(2)
            self._file.setframerate(rate)
            self.rate, self.first = rate, time.perf_counter() - self.began
        self._file.writeframes((np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes())
        self.samples += audio.size
        self.chunks.append(audio)
        self.took = time.perf_counter() - self.began

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def seconds(self) -> float:
        """Length of the audio."""
        return self.samples / self.rate if self.rate else 0.0

    @property
    def audio(self) -> npt.NDArray[np.float32]:
        return np.concatenate(self.chunks) if self.chunks else np.zeros(0, np.float32)

    def figures(self) -> str:
        if not self.samples:
            return "no audio"
        return (
            f"{self.path} ({self.seconds:.1f} s): first audio after {(self.first or 0) * 1000:.0f} ms, "
            f"real-time factor {self.took / self.seconds:.3f}"
        )


@contextmanager
def recording(path: Path) -> Iterator[Recording]:
    """A recording that is closed, and so has a whole header, however the block ends."""
    made = Recording(path)
    try:
        yield made
    finally:
        made.close()


def word_error_rate(said: str, heard: str) -> float:
    """Both sides normalised as the Whisper paper does; 0 is perfect."""
    import jiwer
    from whisper_normalizer.english import EnglishTextNormalizer

    normalise = EnglishTextNormalizer()
    return float(jiwer.wer(normalise(said), normalise(heard)))


async def speak(client: AsyncClient, text: str, path: Path) -> Recording:
    """Synthesise `text` with hibari into the file `path`, chunk by chunk."""
    with recording(path) as made:
        async with client.speak(text, model="hibari", stream=True) as chunks:
            async for chunk in chunks:
                made.add(chunk.audio, chunk.sample_rate)
    return made


async def show(client: AsyncClient, out: Path) -> bool:
    """The three acts; whether the sentence was read back well enough."""
    made = await speak(client, SENTENCE, out / "demo.wav")
    line("said", SENTENCE)
    line("", made.figures())
    heard = await client.transcribe(made.audio, made.rate or 24_000, model="whisper")
    rate = word_error_rate(SENTENCE, heard.text)
    line("heard", heard.text.strip())
    line("", f"word error rate {rate:.2f}, {'within' if rate <= WER_LIMIT else 'ABOVE'} the limit of {WER_LIMIT:.2f}")

    asked = await speak(client, QUESTION, out / "question.wav")
    line("asked", f"{QUESTION}   {asked.path}")
    heard_question, answer = "", ""
    with recording(out / "answer.wav") as reply:
        chat = client.chat(
            audio=asked.audio, sample_rate=asked.rate, model="voice_chat", stream=True, max_tokens=64, temperature=0.0
        )
        async with chat as chunks:
            async for chunk in chunks:
                heard_question = heard_question or chunk.input_text or ""
                answer += chunk.text
                if chunk.sample_rate:
                    reply.add(chunk.audio, chunk.sample_rate)
        whole = time.perf_counter() - reply.began
    line("understood", heard_question.strip())
    line("answered", answer.strip())
    line("", f"{reply.figures()}, whole answer {whole:.1f} s")
    return rate <= WER_LIMIT


def line(label: str, text: str) -> None:
    print(f"{label:>10}  {text}" if label else f"{'':10}  {text}", flush=True)


async def run(out: Path, store: Path | None, display: Display) -> int:
    """Start, show, stop; the exit status."""
    stop = Stop()
    options = ServeOptions(
        pipelines=("hibari", "whisper", "voice_chat"),
        store=store,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        frontend=None,
        log_dir=out,
        supervised=False,
    )
    async with Stack(prepare(options, display), display) as stack:
        if await first(stack.start(), stop.asked.wait()):
            return 128 + signal.SIGINT
        async with AsyncClient(stack.addresses["grpc"]) as client:
            showing = asyncio.create_task(show(client, out))
            if await first(showing, stop.asked.wait()):
                return 128 + signal.SIGINT
    good = showing.result()
    if good:
        line("", "serve it yourself: .venv/bin/triton-omni serve hibari whisper smollm2 voice_chat")
    return 0 if good else 1


def main(out: Path, store: Path | None = None) -> int:
    """`triton-omni demo`: 0 only if the sentence was read back with few enough errors."""
    display = Display()
    try:
        return asyncio.run(run(out, store, display))
    except OmniError as error:
        print(f"triton-omni: {error}", file=sys.stderr)
        return 1

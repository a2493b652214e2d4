"""Pipeline ``whisper``: audio of any length and rate to text, with times for segments and words."""

import asyncio
import json
from contextlib import aclosing

import numpy as np
from omni_runtime import kserve
from omni_runtime.activity import WindowFinder
from omni_runtime.audio import check_rate, check_samples, resample
from omni_runtime.errors import InvalidRequest
from omni_runtime.params import Params
from omni_runtime.pipeline import Pipeline
from pydantic import Field

RATE = 16_000
# Half a minute a call, in whole frames: what comes later is recognised while the rest is still looked through.
BLOCK = 938 * 512


class TranscriptionParams(Params):
    language: str | None = None
    prompt: str = Field(default="", max_length=1_000)
    temperature: float = 0.0
    word_timestamps: bool = False


class TritonPythonModel(Pipeline):
    async def run(self, request):
        params = TranscriptionParams.of(request)
        self.check(params)
        audio, duration = await asyncio.to_thread(self.samples, request)
        prompt, number, first = params.prompt, 0, True
        fixed = {
            "language": self.config.names("languages")[0],
            "audio_duration": np.array([duration], np.float32),
            "usage": json.dumps({"type": "duration", "seconds": round(duration, 3)}),
        }
        async with aclosing(self.windows(request, audio)) as windows:
            async for start, end in windows:
                found = await self.pools["whisper_tiny_en"].infer(
                    request,
                    {"audio": audio[start:end], "prompt": prompt, "word_timestamps": params.word_timestamps},
                    outputs=["segments"],
                )
                for segment in json.loads(kserve.text(found, "segments")):
                    text = segment["text"].lstrip() if first else segment["text"]
                    first = False
                    yield {"text": text, "segments": json.dumps([shifted(segment, start / RATE, number)]), **fixed}
                    number += 1
        if first:
            yield {"text": "", "segments": "[]", **fixed}

    def check(self, params):
        languages = self.config.names("languages")
        if params.language is not None and params.language.lower() not in languages:
            known = ", ".join(languages)
            raise InvalidRequest(f"language {params.language!r} is not understood; there is: {known}", param="language")
        if params.temperature != 0:
            raise InvalidRequest("temperature must be 0: the search is a beam search", param="temperature")

    def samples(self, request):
        """The request's audio at 16 kHz, and its duration in seconds."""
        if not request.has("audio"):
            raise InvalidRequest("audio is required", param="audio")
        rate = check_rate(int(request.scalar("audio_sample_rate", RATE)))
        limit = self.config.integer("max_seconds", 7_200)
        audio = check_samples(request.inputs["audio"], max_samples=limit * rate)
        return resample(audio, rate, RATE), len(audio) / rate

    async def windows(self, request, audio):
        """Where there is speech: sample ranges that the recogniser takes."""
        finder, carried, frame = WindowFinder(512 / RATE), {}, 512
        for at in range(0, len(audio), BLOCK):
            found = await self.pools["silero_vad"].infer(request, {"audio": audio[at : at + BLOCK], **carried})
            carried = {name: found[name] for name in ("state", "context")}
            for start, end in finder.push(found["probability"].tolist()):
                yield start * frame, end * frame
        for start, end in finder.close():
            yield start * frame, end * frame


def shifted(segment, seconds, number):
    """``segment`` in the time of the whole recording."""
    for each in (segment, *segment.get("words", ())):
        each["start"], each["end"] = round(each["start"] + seconds, 3), round(each["end"] + seconds, 3)
    return {"id": number, **segment}

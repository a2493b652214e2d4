"""POST /v1/audio/transcriptions: a file in, its words out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Form, Request
from omni_runtime.errors import Internal
from omni_runtime.kserve import Outputs, scalar, text
from starlette.responses import JSONResponse, PlainTextResponse, Response

from omni_client import subtitles
from omni_client.frontend.context import Context
from omni_client.frontend.edge import Edge
from omni_client.frontend.errors import refused
from omni_client.frontend.schemas import TranscriptionRequest
from omni_client.frontend.speaking import usage
from omni_client.frontend.streaming import Stream, event, started
from omni_client.types import Segment

router = APIRouter(tags=["audio"])
FIELDS = {"audio": "file", "audio_sample_rate": "file", "word_timestamps": "timestamp_granularities"}
# What each format shows of the pipeline's outputs.
OUTPUTS = {
    "json": ("text", "usage"),
    "text": ("text",),
    "srt": ("text", "segments"),
    "vtt": ("text", "segments"),
    "verbose_json": ("text", "segments", "audio_duration", "language", "usage"),
}
SUBTITLES = {"srt": "application/x-subrip", "vtt": "text/vtt"}
_SEGMENT = ("id", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")


@router.post("/v1/audio/transcriptions", response_class=Response)
async def transcribe(
    request: Request, form: Annotated[TranscriptionRequest, Form(media_type="multipart/form-data")]
) -> Response:
    """Writes down what is said in `file` (wav, flac, mp3, ogg, m4a, aac, webm …), up to the limit of decoded audio.

    `stream: true` sends `transcript.text.delta` events, one per segment, and `transcript.text.done`.
    """
    await _check_repeated(request)
    edge = Edge.of(request)
    pipeline = await edge.pipeline(request, form, "transcription", {"user": form.user} if form.user else {})
    words = "word" in form.timestamp_granularities
    given = form.model_dump(include={"language", "prompt", "temperature"}, exclude_none=True)
    params = {**given, **({"word_timestamps": True} if words else {})}
    audio, rate = await edge.decoder.decode(await form.file.read(), sample_rate=edge.settings.decoded_rate)
    inputs = {"audio": audio, "audio_sample_rate": np.array([rate], np.int32)}
    outputs = OUTPUTS[form.response_format]
    responses = edge.call(request, pipeline, inputs, params, outputs, FIELDS, stream=form.stream)
    if form.stream:
        chunks = _events(request, await started(responses))
        return Stream(chunks, "text/event-stream", {}, edge.settings.write_timeout)
    answer = None
    async with aclosing(responses):
        # To the end: leaving after the one answer would cancel a request that is about to finish.
        async for response in responses:
            answer = response
    if answer is None:
        raise Internal(f"{pipeline.name} ended without an answer")
    return _answer(form.response_format, set(form.timestamp_granularities) or {"segment"}, answer)


async def _check_repeated(request: Request) -> None:
    """Of a repeated field the form keeps the last; two files are not one transcription."""
    counts = Counter(name for name, _ in (await request.form()).multi_items() if not name.endswith("[]"))
    for name, count in counts.items():
        if count > 1:
            raise refused(f"{name} is given {count} times", name, "invalid_value")


def _answer(response_format: str, granularities: set[str], outputs: Outputs) -> Response:
    if response_format == "json":
        return JSONResponse({"text": text(outputs, "text"), "usage": usage(outputs)})
    if response_format == "text":
        return PlainTextResponse(text(outputs, "text") + "\n")
    segments: list[dict[str, Any]] = json.loads(text(outputs, "segments", "[]") or "[]")
    if response_format in SUBTITLES:
        cues = [Segment(part["id"], part["start"], part["end"], part["text"]) for part in segments]
        return PlainTextResponse(subtitles.FORMATS[response_format](cues), media_type=SUBTITLES[response_format])
    body: dict[str, Any] = {
        "task": "transcribe",
        "language": text(outputs, "language", ""),
        "duration": round(float(scalar(outputs, "audio_duration")), 3),
        "text": text(outputs, "text"),
    }
    if "word" in granularities:
        spoken = [word for segment in segments for word in segment.get("words", [])]
        body["words"] = [{"word": word["word"].strip(), "start": word["start"], "end": word["end"]} for word in spoken]
    if "segment" in granularities:
        # `seek` is Whisper's position in hundredths of a second; segments here are cut by voice activity instead.
        body["segments"] = [
            {"seek": round(100 * segment["start"]), **{name: segment[name] for name in _SEGMENT if name in segment}}
            for segment in segments
        ]
    return JSONResponse({**body, "usage": usage(outputs)})


async def _events(request: Request, responses: AsyncGenerator[Outputs, None]) -> AsyncGenerator[bytes, None]:
    whole, account = "", None
    async with aclosing(responses):
        try:
            async for outputs in responses:
                account = usage(outputs) or account
                if delta := text(outputs, "text", ""):
                    whole += delta
                    yield event({"type": "transcript.text.delta", "delta": delta})
            yield event({"type": "transcript.text.done", "text": whole, "usage": account})
        except Exception as error:
            yield Context.of(request).fail(error).event()

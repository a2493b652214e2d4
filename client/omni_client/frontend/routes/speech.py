"""POST /v1/audio/speech: text in, audio out, sentence by sentence."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from omni_runtime.kserve import Outputs
from starlette.responses import Response

from omni_client.audio import MEDIA_TYPES
from omni_client.frontend.context import Context
from omni_client.frontend.edge import Edge, drawn
from omni_client.frontend.errors import refused
from omni_client.frontend.schemas import SpeechRequest
from omni_client.frontend.speaking import Voicing, audible, usage
from omni_client.frontend.streaming import Stream, Truncated, event, started

router = APIRouter(tags=["audio"])
# What the pipeline's tensors and settings are called here.
FIELDS = {"text": "input"}
OUTPUTS = ("audio", "sample_rate", "offset", "usage")


@router.post("/v1/audio/speech", response_class=Response, responses={200: {"content": {"audio/*": {}}}})
async def speak(request: Request, body: SpeechRequest) -> Response:
    """Speaks `input`. The answer is sent while it is spoken; its length is not known beforehand.

    `stream_format: sse` sends `speech.audio.delta` events and, with the usage, `speech.audio.done`.
    """
    edge = Edge.of(request)
    pipeline = await edge.pipeline(request, body, "text_to_speech", body.logged())
    inputs = {"text": body.input}
    if body.instructions:
        if "instructions" not in pipeline.inputs:
            raise refused(f"{pipeline.name} does not take instructions", "instructions")
        inputs["instructions"] = body.instructions
    seed = drawn(body.seed)
    params: dict[str, Any] = {"speed": body.speed, "seed": seed, **pipeline.voice(body.voice, "voice")}
    responses = await started(edge.call(request, pipeline, inputs, params, OUTPUTS, FIELDS, stream=True), audible)
    voicing = Voicing(body.response_format)
    headers = {"x-seed": str(seed)}
    if body.stream_format == "sse":
        chunks, media_type = _events(request, responses, voicing), "text/event-stream"
    else:
        chunks, media_type = _bytes(request, responses, voicing), MEDIA_TYPES[body.response_format]
    return Stream(chunks, media_type, headers, edge.settings.write_timeout)


async def _bytes(
    request: Request, responses: AsyncGenerator[Outputs, None], voicing: Voicing
) -> AsyncGenerator[bytes, None]:
    async with aclosing(responses):
        try:
            async for outputs in responses:
                for piece in voicing.pieces(outputs):
                    yield await voicing.push(piece)
            yield await voicing.close()
        except Exception as error:
            Context.of(request).fail(error)
            raise Truncated from error


async def _events(
    request: Request, responses: AsyncGenerator[Outputs, None], voicing: Voicing
) -> AsyncGenerator[bytes, None]:
    account = None
    async with aclosing(responses):
        try:
            async for outputs in responses:
                account = usage(outputs) or account
                for piece in voicing.pieces(outputs):
                    if audio := await voicing.push(piece):
                        yield _delta(audio)
            if audio := await voicing.close():
                yield _delta(audio)
            yield event({"type": "speech.audio.done", "usage": account})
        except Exception as error:
            yield Context.of(request).fail(error).event()


def _delta(audio: bytes) -> bytes:
    return event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})

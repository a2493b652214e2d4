"""POST /v1/chat/completions: messages of text and speech in, text and speech out."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from omni_runtime.kserve import Outputs
from starlette.responses import JSONResponse, Response

from omni_client.frontend.catalog import Pipeline
from omni_client.frontend.context import Context
from omni_client.frontend.conversation import tensors
from omni_client.frontend.edge import Edge, drawn
from omni_client.frontend.errors import ApiError, refused
from omni_client.frontend.replies import OUTPUTS, Piece, Reply, Token, finished, total_usage
from omni_client.frontend.schemas import ChatAudio, ChatRequest
from omni_client.frontend.speaking import Voicing, audible
from omni_client.frontend.streaming import DONE, Stream, event, merged, started

router = APIRouter(tags=["chat"])
# Hz of the empty file that a reply of nothing to pronounce (a lone emoji) becomes; no samples tell a rate.
_SILENT = 24_000
# What the pipeline's tensors and settings are called here.
FIELDS = {"voice": "audio.voice", "speed": "audio.speed"}
Children = AsyncGenerator[tuple[int, Outputs], None]


@router.post("/v1/chat/completions", response_class=JSONResponse)
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answers a conversation. `stream: true` sends `chat.completion.chunk` events and then `[DONE]`.

    Answer k of `n` uses seed + k; the header x-seed tells the first.
    """
    edge = Edge.of(request)
    pipeline = await edge.pipeline(request, body, "chat", body.logged())
    _check(edge, pipeline, body)
    audio = body.audio or ChatAudio()
    params = body.params()
    if body.token_limit is not None:
        params["max_tokens"] = body.token_limit
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    outputs = [*OUTPUTS, *(("token_ids", "logprobs") if body.logprobs else ())]
    if "audio" in pipeline.outputs:
        params["modalities"] = ["text", "audio"] if body.speaks else ["text"]
    if body.speaks:
        params |= pipeline.voice(audio.voice, "audio.voice")
        params |= {} if audio.speed is None else {"speed": audio.speed}
        outputs += ["audio", "sample_rate", "offset"]
    inputs = await tensors(edge, pipeline, body.messages)
    seed = drawn(body.seed)
    count = body.n or 1
    streaming = bool(body.stream)
    children = merged([
        edge.call(
            request, pipeline, inputs, {**params, "seed": drawn(seed, k)}, outputs, FIELDS, stream=streaming
        )
        for k in range(count)
    ])  # fmt: skip
    answer = Answer(body, pipeline.name, count, f"chatcmpl-{uuid.uuid4().hex}", int(time.time()))
    headers = {"x-seed": str(seed)}
    if streaming:
        chunks = answer.stream(
            request, await started(children, lambda child: audible(child[1]) or not Piece.read(child[1], None).empty)
        )
        return Stream(chunks, "text/event-stream", headers, edge.settings.write_timeout)
    return JSONResponse(await answer.whole(children), headers=headers)


def _check(edge: Edge, pipeline: Pipeline, body: ChatRequest) -> None:
    """Refuses what this pipeline cannot do, as its own configuration tells."""
    if body.speaks and "audio" not in pipeline.outputs:
        raise refused(f"{pipeline.name} does not speak: modalities can only hold text", "modalities")
    if body.logprobs and "logprobs" not in pipeline.outputs:
        raise refused(f"{pipeline.name} does not give logprobs", "logprobs")
    if (body.n or 1) > edge.settings.max_choices:
        limit = edge.settings.max_choices
        raise ApiError(400, f"n is above this server's limit of {limit}", param="n", code="invalid_value")


@dataclass
class Answer:
    """Builds the one response object, or its chunks, from the responses of the children."""

    body: ChatRequest
    model: str
    count: int
    id: str
    created: int

    def __post_init__(self) -> None:
        self.replies = [Reply() for _ in range(self.count)]
        format = (self.body.audio or ChatAudio()).format
        self.voicings = [Voicing("pcm" if format == "pcm16" else format) for _ in range(self.count)]
        self.top = (self.body.top_logprobs or 0) if self.body.logprobs else None

    async def whole(self, children: Children) -> dict[str, Any]:
        async with aclosing(children):
            async for k, outputs in children:
                self.replies[k].add(Piece.read(outputs, self.top))
                if self.body.speaks:
                    for spoken in self.voicings[k].pieces(outputs):
                        self.replies[k].audio += await self.voicings[k].push(spoken)
        choices = []
        for k, reply in enumerate(self.replies):
            message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
            if self.body.speaks:
                reply.audio += await self.voicings[k].close(_SILENT)
                data = base64.b64encode(reply.audio).decode()
                # Nothing is kept, so the reference expires at once; the transcript is what a next turn needs.
                audio = {"id": self.audio_id(k), "data": data, "expires_at": self.created, "transcript": reply.text}
                message |= {"content": None, "audio": audio}
            reason = finished(reply, self.model)
            logprobs = None if self.top is None else {"content": _logprobs(reply.tokens), "refusal": None}
            choices.append({"index": k, "message": message, "logprobs": logprobs, "finish_reason": reason})
        head = {"id": self.id, "object": "chat.completion", "created": self.created, "model": self.body.model}
        return {**head, "choices": choices, "usage": total_usage([self.replies])}

    async def stream(self, request: Request, children: Children) -> AsyncGenerator[bytes, None]:
        async with aclosing(children):
            try:
                for k in range(self.count):
                    yield self.chunk(k, {"role": "assistant", "content": "", "refusal": None})
                    if self.body.speaks:
                        yield self.chunk(k, {"audio": {"id": self.audio_id(k)}})
                async for k, outputs in children:
                    piece = Piece.read(outputs, self.top)
                    self.replies[k].add(piece)
                    if piece.text or piece.tokens:
                        yield self.chunk(k, self.written(piece.text), tokens=piece.tokens)
                    for spoken in self.voicings[k].pieces(outputs) if self.body.speaks else ():
                        if data := await self.voicings[k].push(spoken):
                            yield self.chunk(k, _spoken(data))
                for k, reply in enumerate(self.replies):
                    if self.body.speaks:
                        if data := await self.voicings[k].close(_SILENT):
                            yield self.chunk(k, _spoken(data))
                        yield self.chunk(k, {"audio": {"expires_at": self.created}})
                    yield self.chunk(k, {}, finish_reason=finished(reply, self.model))
                if self.counts_usage:
                    yield event({**self.head(), "choices": [], "usage": total_usage([self.replies])})
                yield DONE
            except Exception as error:
                yield Context.of(request).fail(error).event()

    @property
    def counts_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def audio_id(self, k: int) -> str:
        return f"audio_{self.id.removeprefix('chatcmpl-')}_{k}"

    def written(self, text: str) -> dict[str, Any]:
        return {"audio": {"transcript": text}} if self.body.speaks else {"content": text}

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.body.model}

    def chunk(
        self, k: int, delta: dict[str, Any], *, tokens: list[Token] | None = None, finish_reason: str | None = None
    ) -> bytes:
        logprobs = {"content": _logprobs(tokens), "refusal": None} if tokens else None
        choice = {"index": k, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self.head(), "choices": [choice], **({"usage": None} if self.counts_usage else {})})


def _spoken(data: bytes) -> dict[str, Any]:
    return {"audio": {"data": base64.b64encode(data).decode()}}


def _logprobs(tokens: list[Token]) -> list[dict[str, Any]]:
    return [
        {
            "token": token.token,
            "bytes": token.bytes,
            "logprob": token.logprob,
            "top_logprobs": [
                {"token": other, "bytes": Token(other, logprob, []).bytes, "logprob": logprob}
                for other, logprob in token.top
            ],
        }
        for token in tokens
    ]

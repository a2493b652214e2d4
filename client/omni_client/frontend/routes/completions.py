"""POST /v1/completions: prompts, continued without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from omni_runtime.kserve import Outputs
from starlette.responses import JSONResponse, Response

from omni_client.frontend.context import Context
from omni_client.frontend.edge import Edge, drawn
from omni_client.frontend.errors import ApiError, refused
from omni_client.frontend.replies import OUTPUTS, Piece, Reply, Token, finished, total_usage
from omni_client.frontend.schemas import CompletionRequest
from omni_client.frontend.streaming import DONE, Stream, event, merged, started

router = APIRouter(tags=["completions"])
# What the pipeline's tensors and settings are called here.
FIELDS = {"text": "prompt"}
Children = AsyncGenerator[tuple[int, Outputs], None]


@router.post("/v1/completions", response_class=JSONResponse)
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continues every prompt `n` times: choice p·n + k is the k-th for prompt p, with seed + p·n + k."""
    edge = Edge.of(request)
    pipeline = await edge.pipeline(request, body, "chat", body.logged())
    if "text" not in pipeline.inputs or "audio" in pipeline.outputs:
        raise refused(f"{pipeline.name} takes conversations only: use /v1/chat/completions", "model", "wrong_task")
    if body.logprobs is not None and "logprobs" not in pipeline.outputs:
        raise refused(f"{pipeline.name} does not give logprobs", "logprobs")
    n = body.n or 1
    count = n * len(body.prompt)
    if count > edge.settings.max_choices:
        limit = edge.settings.max_choices
        message = f"n times the number of prompts is {count}, above this server's limit of {limit}"
        raise ApiError(400, message, param="n" if n > 1 else "prompt", code="invalid_value")
    params = body.params()
    params["max_tokens"] = 16 if body.max_tokens is None else body.max_tokens
    outputs = list(OUTPUTS)
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        outputs += ["token_ids", "logprobs"]
    seed = drawn(body.seed)
    children = merged([
        edge.call(
            request, pipeline, {"text": body.prompt[k // n]}, {**params, "seed": drawn(seed, k)}, outputs, FIELDS,
            stream=bool(body.stream),
        )
        for k in range(count)
    ])  # fmt: skip
    answer = Answer(body, pipeline.name, count, f"cmpl-{uuid.uuid4().hex}", int(time.time()))
    headers = {"x-seed": str(seed)}
    if body.stream:
        chunks = answer.stream(request, await started(children, lambda child: not Piece.read(child[1], None).empty))
        return Stream(chunks, "text/event-stream", headers, edge.settings.write_timeout)
    return JSONResponse(await answer.whole(children), headers=headers)


@dataclass
class Answer:
    """Builds the one response object, or its chunks (which have the same shape), from the children's responses."""

    body: CompletionRequest
    model: str
    count: int
    id: str
    created: int

    def __post_init__(self) -> None:
        self.replies = [Reply() for _ in range(self.count)]

    async def whole(self, children: Children) -> dict[str, Any]:
        async with aclosing(children):
            async for k, outputs in children:
                self.replies[k].add(Piece.read(outputs, self.body.logprobs))
        choices = [
            self.choice(k, self.echoed(k) + reply.text, reply.tokens, finished(reply, self.model))
            for k, reply in enumerate(self.replies)
        ]
        return {**self.head(), "choices": choices, "usage": self.usage()}

    async def stream(self, request: Request, children: Children) -> AsyncGenerator[bytes, None]:
        async with aclosing(children):
            try:
                for k in range(self.count):
                    if echo := self.echoed(k):
                        yield self.chunk([self.choice(k, echo, [], None)])
                async for k, outputs in children:
                    piece = Piece.read(outputs, self.body.logprobs)
                    offset = len(self.replies[k].text)
                    self.replies[k].add(piece)
                    if piece.text or piece.tokens:
                        yield self.chunk([self.choice(k, piece.text, piece.tokens, None, offset)])
                for k, reply in enumerate(self.replies):
                    yield self.chunk([self.choice(k, "", [], finished(reply, self.model))])
                if self.counts_usage:
                    yield event({**self.head(), "choices": [], "usage": self.usage()})
                yield DONE
            except Exception as error:
                yield Context.of(request).fail(error).event()

    @property
    def counts_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def echoed(self, k: int) -> str:
        return self.body.prompt[k // (self.body.n or 1)] if self.body.echo else ""

    def usage(self) -> dict[str, int]:
        n = self.body.n or 1
        return total_usage(self.replies[first : first + n] for first in range(0, self.count, n))

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.body.model}

    def chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return event({**self.head(), "choices": choices, **({"usage": None} if self.counts_usage else {})})

    def choice(
        self, k: int, text: str, tokens: list[Token], finish_reason: str | None, offset: int = 0
    ) -> dict[str, Any]:
        logprobs = None if self.body.logprobs is None or not tokens else _logprobs(tokens, offset)
        return {"index": k, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: list[Token], offset: int) -> dict[str, Any]:
    """`offset`: where in the answer the first token begins, in characters."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.top) for token in tokens],
        "text_offset": offsets,
    }

"""Every field of every schema changes something or is refused. Driven by the schemas: a new field needs its entry."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import re
import wave
from typing import Any

import numpy as np
import pytest
from omni_client.frontend import schemas
from omni_client.frontend.conversation import formats_of
from omni_client.frontend.fields import REFUSED, StreamOptions


def clip(seconds: float = 0.2) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16_000)
        written.writeframes((np.sin(np.arange(int(16_000 * seconds))) * 9000).astype("<i2").tobytes())
    return file.getvalue()


def spoken(seconds: float = 0.2) -> dict[str, Any]:
    return {"data": base64.b64encode(clip(seconds)).decode(), "format": "wav"}


def said(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def parts(*content: dict[str, Any]) -> dict[str, Any]:
    return said({"role": "user", "content": list(content)})


TEXT = {"type": "text", "text": "hi"}
CHAT = {"model": "writer", "messages": [{"role": "user", "content": "hi"}], "seed": 1}
TALK = CHAT | {"model": "talker", "modalities": ["text", "audio"]}
WRITE = {"model": "writer", "prompt": "hi", "seed": 1}
SPEAK = {"model": "speaker", "input": "One.", "seed": 1, "response_format": "wav"}
HEAR = {"model": "hearer"}
_SAMPLED = {
    "frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.5, "temperature": 0.5, "top_p": 0.5,
    "top_k": 3, "min_p": 0.5, "min_tokens": 2, "ignore_eos": True, "seed": 2, "stop": "x", "n": 2, "stream": True,
    "user": "u", "safety_identifier": "s", "metadata": {"k": "v"},
}  # fmt: skip
SAMPLED = {name: {name: value} for name, value in _SAMPLED.items()}
PATHS = {
    "speech": "/v1/audio/speech", "transcription": "/v1/audio/transcriptions", "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
}  # fmt: skip
CALLED = {"priority": {"priority": "high"}, "timeout": {"timeout": 30}}
# Route, schema, a base body, and for every field of the schema a body which differs in it (or the base and the body).
Change = dict[str, Any] | tuple[dict[str, Any], dict[str, Any]]
TABLE: list[tuple[str, Any, dict[str, Any], dict[str, Change]]] = [
    ("speech", schemas.SpeechRequest, SPEAK, CALLED | {
        "model": {"model": "hearer"}, "input": {"input": "Two."}, "voice": {"voice": "bella"},
        "instructions": {"instructions": "be kind"}, "response_format": {"response_format": "pcm"},
        "speed": {"speed": 2}, "stream_format": {"stream_format": "sse"}, "seed": {"seed": 2}, "user": {"user": "u"},
        "safety_identifier": {"safety_identifier": "s"}, "metadata": {"metadata": {"k": "v"}},
    }),
    ("transcription", schemas.TranscriptionRequest, HEAR, CALLED | {
        "file": {"file": clip(0.5)}, "model": {"model": "speaker"}, "language": {"language": "en"},
        "prompt": {"prompt": "x"}, "response_format": {"response_format": "text"}, "temperature": {"temperature": 0.5},
        "timestamp_granularities":
            (HEAR | {"response_format": "verbose_json"}, {"timestamp_granularities[]": "word"}),
        "stream": {"stream": "true"}, "user": {"user": "u"},
    }),
    ("chat", schemas.ChatRequest, CHAT, CALLED | SAMPLED | {
        "model": {"model": "talker"}, "messages": said({"role": "user", "content": "ho"}),
        "audio": (TALK, {"audio": {"format": "mp3"}}), "logprobs": {"logprobs": True},
        "max_completion_tokens": {"max_completion_tokens": 2}, "max_tokens": {"max_tokens": 2},
        "modalities": (TALK, {"modalities": ["text"]}),
        "top_logprobs": (CHAT | {"logprobs": True}, {"top_logprobs": 2}),
        "stream_options": (CHAT | {"stream": True}, {"stream_options": {"include_usage": True}}),
    }),
    ("completion", schemas.CompletionRequest, WRITE, CALLED | SAMPLED | {
        "model": {"model": "talker"}, "prompt": {"prompt": "ho"}, "echo": {"echo": True}, "logprobs": {"logprobs": 1},
        "max_tokens": {"max_tokens": 2},
        "stream_options": (WRITE | {"stream": True}, {"stream_options": {"include_usage": True}}),
    }),
    ("chat", schemas.Message, CHAT, {
        "role": said({"role": "system", "content": "hi"}), "content": said({"role": "user", "content": "ho"}),
        "audio": said({"role": "assistant", "audio": {"transcript": "hi"}}),
    }),
    ("chat", schemas.Part, TALK | parts(TEXT), {
        "type": parts({"type": "input_audio", "text": "hi"}), "text": parts({"type": "text", "text": "ho"}),
        "input_audio": parts({"type": "input_audio", "input_audio": spoken()}),
    }),
    ("chat", schemas.InputAudio, TALK | parts({"type": "input_audio", "input_audio": spoken()}), {
        "data": parts({"type": "input_audio", "input_audio": spoken(0.5)}),
        "format": parts({"type": "input_audio", "input_audio": spoken() | {"format": "mp3"}}),
    }),
    ("chat", schemas.ChatAudio, TALK | {"audio": {}}, {
        "voice": {"audio": {"voice": "heart"}}, "format": {"audio": {"format": "flac"}},
        "speed": {"audio": {"speed": 2}},
    }),
    ("chat", schemas.SpokenReply, CHAT | said({"role": "assistant", "audio": {"transcript": "hi"}}), {
        "transcript": said({"role": "assistant", "audio": {"transcript": "ho"}}),
        # The rest is our own answer sent back; the transcript is all of it that can be used.
        "id": {}, "data": {}, "expires_at": {},
    }),
    ("chat", StreamOptions, CHAT | {"stream": True}, {"include_usage": {"stream_options": {"include_usage": True}}}),
]  # fmt: skip
CASES = [
    pytest.param(route, *(change if isinstance(change, tuple) else (base, change)), id=f"{schema.__name__}-{field}")
    for route, schema, base, changes in TABLE
    for field, change in changes.items()
    if change
]


@pytest.mark.parametrize(("route", "schema", "base", "changes"), TABLE, ids=[entry[1].__name__ for entry in TABLE])
def test_the_table_covers_the_schema(route: str, schema: Any, base: Any, changes: dict[str, Any]) -> None:
    assert set(changes) == set(schema.model_fields)


class Watch:
    """Everything that a request did which someone could see: status, body, headers, calls to Triton, log."""

    def __init__(self, front: Any, access_log: asyncio.Queue[dict[str, Any]]) -> None:
        self.front, self.access_log = front, access_log

    async def of(self, route: str, body: dict[str, Any]) -> str:
        self.front.triton.calls.clear()
        if route == "transcription":
            fields = {name: value for name, value in body.items() if name != "file"}
            files = {"file": ("a.wav", body.get("file", clip()))}
            answer = await self.front.http.post(PATHS[route], data=fields, files=files)
        else:
            answer = await self.front.http.post(PATHS[route], json=body)
        record = await self.access_log.get()
        logged = {name: record.get(name) for name in ("user", "safety_identifier", "metadata")}
        seen = [
            (call.model, call.inputs, sorted(call.outputs), call.parameters.get("omni_priority"), seconds(call))
            for call in self.front.triton.calls
        ]
        headers = {name: answer.headers.get(name) for name in ("content-type", "x-seed")}
        content = re.sub(rb'(cmpl-|audio_)\w+|"(created|expires_at)":\d+', b"", answer.content)
        return repr((answer.status_code, content, headers, sorted(map(repr, seen)), logged))


def seconds(call: Any) -> int:
    """The time that Triton is told the call has, in whole seconds."""
    return math.ceil(call.parameters["timeout"] / 1e6)


@pytest.fixture
def watch(front: Any, access_log: Any) -> Watch:
    return Watch(front, access_log)


@pytest.mark.parametrize(("route", "base", "change"), CASES)
async def test_every_accepted_field_changes_something(
    watch: Watch, route: str, base: dict[str, Any], change: dict[str, Any]
) -> None:
    before = await watch.of(route, base)
    assert await watch.of(route, base) == before, "the observation itself is not steady"
    assert before.startswith("(200")
    assert await watch.of(route, base | change) != before


BASES = {"speech": SPEAK, "transcription": HEAR, "chat": CHAT, "completion": WRITE}


@pytest.mark.parametrize("route", list(BASES))
async def test_known_fields_are_accepted_at_their_defaults_and_else_refused_by_name(watch: Watch, route: str) -> None:
    before = await watch.of(route, BASES[route])
    for field, defaults in REFUSED[route].items():
        for default in defaults:
            if route == "transcription" and not isinstance(default, str):
                continue  # a form can only leave it out
            assert await watch.of(route, BASES[route] | {field: default}) == before, field
        refusal = await watch.of(route, BASES[route] | {field: "something else"})
        assert refusal.startswith("(400") and f'"param":"{field}"' in refusal, field


async def test_the_same_for_messages(watch: Watch) -> None:
    before = await watch.of("chat", CHAT)
    message = CHAT["messages"][0]
    for field, defaults in REFUSED["message"].items():
        for default in defaults:
            assert await watch.of("chat", CHAT | said(message | {field: default})) == before
        refusal = await watch.of("chat", CHAT | said(message | {field: "something else"}))
        assert refusal.startswith("(400") and f'"param":"messages[0].{field}"' in refusal


async def test_null_is_as_good_as_leaving_it_out(watch: Watch) -> None:
    for route, schema, base, _ in TABLE[2:4]:
        optional = {name: None for name, field in schema.model_fields.items() if not field.is_required()}
        assert await watch.of(route, base | optional | {"seed": 1}) == await watch.of(route, base)


def test_formats_are_told_by_their_first_bytes() -> None:
    assert formats_of(clip()) == {"wav"} and formats_of(b"") == formats_of(b"text") == set()
    assert formats_of(b"\xff\xfb\x90\x00") == {"mp3"} and formats_of(b"\xff\xf1\x50\x80") == {"aac"}
    assert formats_of(b"ID3\x04") == {"mp3", "aac", "flac"} and formats_of(b"OggS") == {"ogg", "opus"}
    assert formats_of(b"\0\0\0\x20ftypM4A ") == {"m4a"} and formats_of(b"fLaC") == {"flac"}
    assert formats_of(b"\x1aE\xdf\xa3") == {"webm"}

"""POST /v1/audio/speech over scripted pipelines."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import av
import httpx
import numpy as np
import pytest


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


@pytest.mark.parametrize(
    ("response_format", "media_type"),
    [("wav", "audio/wav"), ("pcm", "audio/pcm"), ("flac", "audio/flac"), ("mp3", "audio/mpeg"), ("opus", "audio/ogg"),
     ("aac", "audio/aac")],
)  # fmt: skip
async def test_every_format_plays(front: Any, response_format: Any, media_type: str) -> None:
    answer = await front.openai.audio.speech.create(
        model="speaker", input="One. Two.", voice="heart", response_format=response_format
    )
    data = answer.content
    assert answer.response.headers["content-type"] == media_type
    if response_format == "pcm":
        assert len(data) == 2 * 4800
        return
    with av.open(io.BytesIO(data)) as container:
        samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)])
    assert samples.size >= 4800


async def test_mp3_is_the_default_and_a_wav_is_open_ended(front: Any) -> None:
    mp3 = await front.http.post("/v1/audio/speech", json={"model": "speaker", "input": "One."})
    assert mp3.headers["content-type"] == "audio/mpeg"
    wav = await front.http.post(
        "/v1/audio/speech", json={"model": "speaker", "input": "One.", "response_format": "wav"}
    )
    assert wav.content[:4] == b"RIFF" and wav.content[4:8] == b"\xff\xff\xff\xff"
    assert wav.headers["transfer-encoding"] == "chunked"


async def test_the_first_sentence_is_sent_before_the_second_exists(front: Any) -> None:
    body = {"model": "speaker", "input": "One. wait.", "response_format": "pcm"}
    async with front.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        chunks = answer.aiter_raw()
        assert len(await anext(chunks)) == 4800
        call = front.last()
        await call.running.wait()
        assert not call.cancelled.is_set()
    async with asyncio.timeout(10):
        await call.cancelled.wait()


async def test_sse_sends_deltas_and_the_usage(front: Any) -> None:
    body = {"model": "speaker", "input": "One. Two.", "response_format": "pcm", "stream_format": "sse"}
    answer = await front.http.post("/v1/audio/speech", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events(answer.text)
    assert [delta["type"] for delta in deltas] == ["speech.audio.delta"] * 2
    assert sum(len(base64.b64decode(delta["audio"])) for delta in deltas) == 9600
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18},
    }


async def test_joined_sse_equals_the_plain_stream(front: Any) -> None:
    body = {"model": "speaker", "input": "One. Two.", "response_format": "flac", "seed": 0}
    plain = (await front.http.post("/v1/audio/speech", json=body)).content
    sse = events((await front.http.post("/v1/audio/speech", json=body | {"stream_format": "sse"})).text)
    assert b"".join(base64.b64decode(event["audio"]) for event in sse if "audio" in event) == plain


async def test_the_seed_is_told_and_zero_is_one(front: Any) -> None:
    for seed in (0, 5, 2**63 - 1):
        answer = await front.http.post("/v1/audio/speech", json={"model": "speaker", "input": "One.", "seed": seed})
        assert answer.headers["x-seed"] == str(seed)
        assert front.last().params["seed"] == seed
    drawn = [
        (await front.http.post("/v1/audio/speech", json={"model": "speaker", "input": "One."})).headers["x-seed"]
        for _ in range(2)
    ]
    assert drawn[0] != drawn[1]
    assert front.last().params["seed"] == int(drawn[1])


async def test_voices_by_name_by_id_and_by_default(front: Any) -> None:
    for voice, sent in [("bella", "bella"), ({"id": "bella"}, "bella"), ("default", None), (None, None)]:
        answer = await front.http.post("/v1/audio/speech", json={"model": "tts-1", "input": "One.", "voice": voice})
        assert answer.status_code == 200
        assert front.last().params.get("voice") == sent


@pytest.mark.parametrize(
    ("change", "status", "param", "named"),
    [
        ({"input": ""}, 400, "input", "input"),
        ({"input": " \n"}, 400, "input", "input"),
        ({"input": 3}, 400, "input", "string"),
        ({"input": "\ud800"}, 400, "input", "surrogate"),
        ({"speed": 0}, 400, "speed", "0.25"),
        ({"speed": 4.01}, 400, "speed", "4"),
        ({"speed": "1"}, 400, "speed", "number"),
        ({"speed": float("nan")}, 400, "speed", "finite"),
        ({"speed": float("inf")}, 400, "speed", "finite"),
        ({"voice": "nobody"}, 404, "voice", "heart, bella"),
        ({"voice": {"name": "heart"}}, 400, "voice", "string"),
        ({"model": "nothing"}, 404, "model", "speaker, talker, writer, tts-1"),
        ({"model": "writer"}, 400, "model", "speaker, tts-1"),
        ({"response_format": "ogg"}, 400, "response_format", "'mp3'"),
        ({"stream_format": "chunks"}, 400, "stream_format", "'sse'"),
        ({"instructions": "whisper"}, 400, "instructions", "speaker"),
        ({"seed": -1}, 400, "seed", "0"),
        ({"seed": 1.5}, 400, "seed", "integer"),
        ({"language": "en"}, 400, "language", "unknown field"),
        ({"metadata": {"a": 1}}, 400, "metadata.a", "string"),
    ],
)
async def test_bad_fields_are_named_and_the_next_request_is_fine(
    front: Any, change: dict[str, Any], status: int, param: str, named: str
) -> None:
    good = {"model": "speaker", "input": "One."}
    # httpx refuses NaN, other clients do not.
    answer = await front.http.post(
        "/v1/audio/speech", content=json.dumps(good | change), headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert param in error["message"] and named in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (await front.http.post("/v1/audio/speech", json=good)).status_code == 200


@pytest.mark.parametrize(
    ("text", "status", "code", "kind"),
    [
        ("overload", 429, "overloaded", "rate_limit_error"),
        ("crash", 500, "internal_error", "server_error"),
    ],
)
async def test_what_the_server_says_becomes_a_status(front: Any, text: str, status: int, code: str, kind: str) -> None:
    for stream_format in ("audio", "sse"):
        body = {"model": "speaker", "input": text, "stream_format": stream_format}
        answer = await front.http.post("/v1/audio/speech", json=body, headers={"x-request-id": "mine"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (status, code, kind)
        assert answer.headers["x-request-id"] == "mine"
        if status == 429:
            assert answer.headers["retry-after"] == "7"
        if status == 500:
            assert "mine" in error["message"]


async def test_a_field_that_the_pipeline_refuses_has_its_name_here(front: Any) -> None:
    answer = await front.http.post("/v1/audio/speech", json={"model": "speaker", "input": "refuse"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert answer.json()["error"]["message"] == "input is too odd"
    answer = await front.http.post("/v1/completions", json={"model": "writer", "prompt": "refuse"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert answer.json()["error"]["message"] == "prompt is too odd"


async def test_a_stage_that_dies_in_the_stream_ends_it_with_the_error(front: Any) -> None:
    body = {"model": "speaker", "input": "One. break.", "response_format": "pcm", "stream_format": "sse"}
    last = events((await front.http.post("/v1/audio/speech", json=body)).text)[-1]
    assert last["error"]["code"] == "stage_unavailable"
    with pytest.raises(httpx.RemoteProtocolError):
        await front.http.post("/v1/audio/speech", json=body | {"stream_format": "audio"})
    assert (await front.http.post("/v1/audio/speech", json={"model": "speaker", "input": "One."})).status_code == 200


async def test_emoji_and_control_characters_arrive(front: Any) -> None:
    text = "a\x00b\x07 \U0001f600 é"
    answer = await front.http.post("/v1/audio/speech", json={"model": "speaker", "input": text})
    assert answer.status_code == 200
    assert front.last().inputs["text"] == text

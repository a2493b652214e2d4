"""POST /v1/chat/completions over scripted pipelines, with the openai SDK."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from typing import Any

import httpx
import numpy as np
import openai
import pytest

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def clip(rate: int = 16_000, seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes((np.sin(np.arange(int(rate * seconds))) * 9000).astype("<i2").tobytes())
    return file.getvalue()


def heard(data: bytes, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}}


async def test_an_answer_has_openais_shape(front: Any) -> None:
    answer = await front.openai.chat.completions.create(model="writer", messages=HELLO, seed=3)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "writer"
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world 3")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 4, 9)
    assert front.last().inputs["stream"] is False


async def test_chunks_have_openais_shape_and_order(front: Any) -> None:
    body = {"model": "writer", "messages": HELLO, "seed": 3, "stream": True, "stream_options": {"include_usage": True}}
    text = (await front.http.post("/v1/chat/completions", json=body)).text
    *lines, done = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert done == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    first, *written, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in written) == "Hello world 3"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *written])
    assert finish["choices"][0]["delta"] == {} and finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 9
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    without = await front.http.post("/v1/chat/completions", json=body | {"stream_options": None})
    assert "usage" not in without.text


async def test_n_answers_have_their_own_seeds(front: Any) -> None:
    answer = await front.openai.chat.completions.create(model="writer", messages=HELLO, seed=10, n=3)
    assert [choice.message.content for choice in answer.choices] == [f"Hello world {10 + k}" for k in range(3)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    stream = await front.openai.chat.completions.create(model="writer", messages=HELLO, seed=10, n=3, stream=True)
    texts, reasons = [""] * 3, [""] * 3
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [f"Hello world {10 + k}" for k in range(3)] and reasons == ["stop"] * 3
    assert len({call.request_id for call in front.triton.calls}) == 6


async def test_logprobs(front: Any) -> None:
    answer = await front.openai.chat.completions.create(
        model="writer", messages=HELLO, seed=1, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [token.token for token in content] == ["Hello", " wor", "ld", " 1"]
    assert content[0].bytes == list(b"Hello") and content[0].logprob == -0.5
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("Hello", -0.5), ("other", -1.5)]
    stream = await front.openai.chat.completions.create(
        model="writer", messages=HELLO, seed=1, logprobs=True, stream=True
    )
    tokens = [token async for chunk in stream for c in chunk.choices if c.logprobs for token in c.logprobs.content]
    assert [token.token for token in tokens] == ["Hello", " wor", "ld", " 1"]
    assert tokens[0].top_logprobs == []


async def test_settings_reach_the_pipeline_and_what_is_left_out_does_not(front: Any) -> None:
    given = {
        "temperature": 0, "top_p": 0.5, "presence_penalty": -1, "frequency_penalty": 1.5, "stop": ["a", "b"],
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 0, "max_tokens": 2,
    }  # fmt: skip
    answer = await front.http.post("/v1/chat/completions", json={"model": "writer", "messages": HELLO, **given})
    assert front.last().params == given
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    await front.openai.chat.completions.create(
        model="writer", messages=HELLO, seed=1, stop="x", max_completion_tokens=9
    )
    assert front.last().params == {"seed": 1, "stop": ["x"], "max_tokens": 9}


async def test_messages_are_handed_on_in_plain_form(front: Any) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "audio": {"id": "audio_1", "transcript": "earlier"}},
        {"role": "user", "content": "é\U0001f600"},
    ]
    await front.openai.chat.completions.create(model="writer", messages=messages)
    assert json.loads(front.last().inputs["messages"]) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "earlier"},
        {"role": "user", "content": "é\U0001f600"},
    ]


async def test_speech_in_and_out(front: Any) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [heard(clip(8_000, 0.5))]},
        {"role": "user", "content": [{"type": "text", "text": "and"}, heard(clip(44_100, 1.0))]},
    ]
    answer = await front.openai.chat.completions.create(
        model="talker",
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "heart", "format": "wav"},
        seed=1,
    )
    message = answer.choices[0].message
    assert message.content is None and message.audio.transcript == "Hello world 1"
    assert message.audio.id.startswith("audio_") and message.audio.expires_at == answer.created
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as spoken:
        assert spoken.getframerate() == 24_000
        assert len(spoken.readframes(1 << 20)) == 2 * 4 * 2400
    call = front.last()
    assert call.params == {"modalities": ["text", "audio"], "voice": "heart", "seed": 1}
    assert call.inputs["audio_lengths"].tolist() == [8_000, 16_000] and call.inputs["audio"].size == 24_000
    assert call.inputs["audio_sample_rate"].tolist() == [16_000]
    sent = json.loads(call.inputs["messages"])
    assert sent[0]["content"] == [{"type": "input_audio", "input_audio": {"tensor": "audio", "index": 0}}]
    assert sent[1]["content"][1] == {"type": "input_audio", "input_audio": {"tensor": "audio", "index": 1}}


async def test_streamed_speech(front: Any) -> None:
    stream = await front.openai.chat.completions.create(
        model="talker", messages=HELLO, modalities=["text", "audio"], audio={"voice": "heart", "format": "pcm16"},
        seed=1, stream=True,
    )  # fmt: skip
    parts: dict[str, list[Any]] = {"id": [], "transcript": [], "data": [], "expires_at": []}
    async for chunk in stream:
        if chunk.choices[0].delta.audio is not None:
            for name, value in chunk.choices[0].delta.audio.to_dict().items():
                parts[name].append(value)
    assert len(parts["id"]) == len(parts["expires_at"]) == 1
    assert "".join(parts["transcript"]) == "Hello world 1"
    assert len(parts["data"]) == 4 and sum(len(base64.b64decode(data)) for data in parts["data"]) == 2 * 9600


async def test_a_speaking_pipeline_is_told_when_only_text_is_wanted(front: Any) -> None:
    answer = await front.openai.chat.completions.create(model="talker", messages=HELLO, seed=1)
    assert answer.choices[0].message.content == "Hello world 1"
    assert front.last().params["modalities"] == ["text"] and "audio" not in front.last().outputs


TEXT_PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [TEXT_PART, heard(b"RIFF")]}]}, "messages[0].content[1]"),
        ({"model": "talker", "messages": [{"role": "user", "content": [TEXT_PART, heard(b"")]}]},
         "messages[0].content[1].input_audio.data"),
        ({"model": "talker", "messages": [{"role": "user", "content": [
            {"type": "input_audio", "input_audio": {"data": "%%", "format": "wav"}}]}]},
         "messages[0].content[0].input_audio.data"),
        ({"model": "talker", "messages": [{"role": "user", "content": [heard(clip(), "xyz")]}]},
         "messages[0].content[0].input_audio.format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["video"]}, "modalities[0]"),
        ({"audio": {"voice": "heart", "format": "wav"}}, "audio"),
        ({"model": "talker", "modalities": ["text", "audio"], "audio": {"format": "ogg"}}, "audio.format"),
        ({"model": "talker", "modalities": ["text", "audio"], "audio": {"voice": "nobody"}}, "audio.voice"),
        ({"model": "talker", "logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"foo": True}}, "stream_options.foo"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"store": True}, "store"),
        ({"guidance_scale": 0}, "guidance_scale"),
    ],
)  # fmt: skip
async def test_bad_fields_are_named(front: Any, change: dict[str, Any], param: str) -> None:
    answer = await front.http.post("/v1/chat/completions", json={"model": "writer", "messages": HELLO} | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "audio.voice" else 400, param)
    assert error["message"]
    assert not front.triton.calls


async def test_the_sdk_raises_its_own_exceptions(front: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await front.openai.chat.completions.create(model="nothing", messages=HELLO)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.RateLimitError):
        await front.openai.chat.completions.create(model="writer", messages=[{"role": "user", "content": "overload"}])
    with pytest.raises(openai.BadRequestError):
        await front.openai.chat.completions.create(model="speaker", messages=HELLO)
    # Once the answer has begun, its last event is the error.
    stream = await front.openai.chat.completions.create(
        model="writer", messages=[{"role": "user", "content": "break"}], stream=True
    )
    with pytest.raises(openai.APIError, match="language model died"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ends_well_is_read_to_its_end(front: Any, stream: bool) -> None:
    body = {"model": "writer", "messages": HELLO, "n": 3, "stream": stream}
    assert (await front.http.post("/v1/chat/completions", json=body)).status_code == 200
    for call in front.triton.calls:
        await call.ended.wait()
        assert not call.cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_cancels_the_work(front: Any, stream: bool, n: int) -> None:
    body = {"model": "writer", "messages": [{"role": "user", "content": "wait"}], "stream": stream, "n": n}
    async with asyncio.timeout(20):
        leaving = asyncio.create_task(_read(front.http, body))
        await front.triton.called(n)
        for call in front.triton.calls:
            await call.running.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        for call in front.triton.calls:
            await call.cancelled.wait()
    assert (await front.openai.chat.completions.create(model="writer", messages=HELLO)).choices


async def _read(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_raw():
            pass


async def test_one_failing_child_ends_its_companions(front: Any) -> None:
    """The second child cannot exist, so its prompt fails while the first still writes."""
    async with asyncio.timeout(20):
        answer = await front.http.post(
            "/v1/completions", json={"model": "writer", "prompt": ["wait", "overload"], "seed": 1}
        )
        assert answer.status_code == 429
        waiting = next(call for call in front.triton.calls if call.inputs["text"] == "wait")
        await waiting.cancelled.wait()

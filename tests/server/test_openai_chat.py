"""/v1/chat/completions and /v1/completions of the running stack, with the official SDK."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import numpy as np
import openai
import pytest

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def client(stack: Any) -> Any:
    with openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0, timeout=180) as client:
        yield client


def ask(client: Any, **given: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "smollm2", "messages": FRANCE, "temperature": 0, "max_tokens": 16} | given
    )


def test_an_answer(client: Any) -> None:
    answer = ask(client)
    choice = answer.choices[0]
    assert "Paris" in choice.message.content and choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.prompt_tokens > 10
    assert ask(client).choices[0].message.content == choice.message.content


def test_the_stream_joins_to_the_whole(client: Any) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_token_limits(client: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, **{name: 2})
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "length")


def test_stop_cuts_the_answer(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count from one to ten with commas."}]
    whole = ask(client, messages=messages, max_tokens=40).choices[0].message.content
    word = whole.split()[3]
    cut = ask(client, messages=messages, max_tokens=40, stop=[word, "never said"]).choices[0]
    assert cut.finish_reason == "stop" and cut.message.content == whole[: whole.index(word)]
    streamed = ask(client, messages=messages, max_tokens=40, stop=word, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == cut.message.content


def test_n_and_seeds(client: Any) -> None:
    story: list[Any] = [{"role": "user", "content": "Invent a name for a boat."}]
    given: dict[str, Any] = {"messages": story, "temperature": 1.0, "max_tokens": 12}
    three = ask(client, n=3, seed=5, **given)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2] and len(set(texts)) > 1
    alone = [ask(client, seed=5 + k, **given) for k in range(3)]
    assert texts == [answer.choices[0].message.content for answer in alone]
    assert three.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert three.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in alone)
    joined = [""] * 3
    for chunk in ask(client, n=3, seed=5, stream=True, **given):
        for choice in chunk.choices:
            joined[choice.index] += choice.delta.content or ""
    assert joined == texts


def test_logprobs(client: Any) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
    streamed = [
        token
        for chunk in ask(client, logprobs=True, top_logprobs=3, max_tokens=4, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in content]


@pytest.mark.parametrize(
    "change",
    [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"extra_body": {"repetition_penalty": 1.9}},
     {"temperature": 1.5, "seed": 1}, {"temperature": 1.5, "seed": 1, "top_p": 0.3},
     {"temperature": 1.5, "seed": 1, "extra_body": {"top_k": 2}},
     {"temperature": 1.5, "seed": 1, "extra_body": {"min_p": 0.3}}],
)  # fmt: skip
def test_sampling_changes_the_answer_and_is_repeatable(client: Any, change: dict[str, Any]) -> None:
    story: list[Any] = [{"role": "user", "content": "Tell a long story about rain, rain and rain."}]
    plain = {name: value for name, value in change.items() if name in ("temperature", "seed") and len(change) > 2}
    first = [ask(client, messages=story, max_tokens=40, **change).choices[0].message.content for _ in range(2)]
    assert first[0] == first[1] != ask(client, messages=story, max_tokens=40, **plain).choices[0].message.content


def test_speech_in_and_out(client: Any) -> None:
    question = client.audio.speech.create(
        model="hibari", voice="heart", input="What is the capital of France?", response_format="wav"
    ).content
    clip = {"data": base64.b64encode(question).decode(), "format": "wav"}
    messages: list[Any] = [{"role": "user", "content": [{"type": "input_audio", "input_audio": clip}]}]
    given: dict[str, Any] = {"model": "voice_chat", "messages": messages, "modalities": ["text", "audio"], "seed": 1}
    answer = ask(client, **given, audio={"voice": "heart", "format": "wav"}, max_tokens=30)
    audio = answer.choices[0].message.audio
    assert answer.choices[0].message.content is None and "Paris" in audio.transcript
    with wave.open(io.BytesIO(base64.b64decode(audio.data))) as spoken:
        whole = np.frombuffer(spoken.readframes(1 << 24), "<i2")
    assert len(whole) > 0.5 * 24_000
    data, transcript = b"", ""
    for chunk in ask(client, **given, audio={"voice": "heart", "format": "pcm16"}, max_tokens=30, stream=True):
        if chunk.choices[0].delta.audio is not None:
            data += base64.b64decode(chunk.choices[0].delta.audio.data or "")
            transcript += chunk.choices[0].delta.audio.transcript or ""
    assert transcript == audio.transcript
    assert np.abs(np.frombuffer(data, "<i2").astype(int) - whole).max() <= 1
    text_only = ask(client, model="voice_chat", messages=messages, max_tokens=30)
    assert text_only.choices[0].message.audio is None and text_only.choices[0].message.content == transcript


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"n": 0}, "n"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": "a " * 20_000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"model": "voice_chat", "logprobs": True}, "logprobs"),
        ({"extra_body": {"beams": 4}}, "beams"),
    ],
)
def test_bad_input_is_named_and_the_next_request_is_fine(client: Any, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **change)
    assert refused.value.param == param
    assert ask(client, max_tokens=1).choices


def test_completions(client: Any) -> None:
    def complete(**given: Any) -> Any:
        prompt = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
        return client.completions.create(**prompt | given)

    whole = complete()
    assert "Paris" in whole.choices[0].text and whole.usage.completion_tokens <= 8
    assert complete(echo=True).choices[0].text == "The capital of France is" + whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in complete(stream=True)) == whole.choices[0].text
    several = complete(prompt=["The capital of France is", "Water is made of"], n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == whole.choices[0].text
    logprobs = complete(logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == whole.choices[0].text and all(len(top) == 2 for top in logprobs.top_logprobs)
    with pytest.raises(openai.BadRequestError, match="suffix"):
        complete(suffix="!")

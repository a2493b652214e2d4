"""POST /v1/completions over scripted pipelines."""

from __future__ import annotations

import json
from typing import Any

import pytest


async def test_prompts_times_n(front: Any) -> None:
    answer = await front.openai.completions.create(model="writer", prompt=["a", "b"], n=2, seed=7)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [f"Hello world {7 + k}" for k in range(4)]
    assert sorted(call.inputs["text"] for call in front.triton.calls) == ["a", "a", "b", "b"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 16)
    assert front.last().params["max_tokens"] == 16


async def test_echo_and_stream(front: Any) -> None:
    whole = await front.openai.completions.create(model="writer", prompt="Say: ", echo=True, seed=1)
    assert whole.choices[0].text == "Say: Hello world 1"
    stream = await front.openai.completions.create(
        model="writer", prompt="Say: ", echo=True, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4


async def test_logprobs_in_the_older_shape(front: Any) -> None:
    answer = await front.openai.completions.create(model="writer", prompt="x", logprobs=2, seed=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["Hello", " wor", "ld", " 1"] and logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 5, 9, 11]
    assert logprobs.top_logprobs[0] == {"Hello": -0.5, "other": -1.5}
    stream = await front.openai.completions.create(model="writer", prompt="x", logprobs=0, seed=1, stream=True)
    found = [chunk.choices[0].logprobs for chunk in [c async for c in stream] if chunk.choices[0].logprobs]
    assert [piece.text_offset[0] for piece in found] == [0, 5, 9, 11]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ["x"] * 100, "n": 2}, "n"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"model": "talker"}, "model"),
        ({"messages": []}, "messages"),
    ],
)
async def test_bad_fields_are_named(front: Any, change: dict[str, Any], param: str) -> None:
    answer = await front.http.post("/v1/completions", json={"model": "writer", "prompt": "x"} | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_values_that_ask_for_nothing_are_accepted(front: Any) -> None:
    nothing = {"suffix": None, "best_of": 1, "logit_bias": {}, "stream_options": None, "user": None}
    assert (await front.http.post("/v1/completions", json={"model": "writer", "prompt": "x", **nothing})).is_success
    both = {"model": "writer", "prompt": "x", "n": 2, "best_of": 2}
    assert len(json.loads((await front.http.post("/v1/completions", json=both)).text)["choices"]) == 2

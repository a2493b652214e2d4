"""Tensors in, tensors out, over the tiny engine and a transport that keeps what is sent."""

import json

import numpy as np
import pytest
from omni_runtime.ar.chat import ChatTemplate
from omni_runtime.ar.server import ArHandler
from omni_runtime.errors import InvalidRequest
from omni_runtime.folding import fold
from omni_runtime.kserve import array, text
from omni_runtime.request import Request


class Nowhere:
    def send(self, outputs, *, last) -> None:
        raise AssertionError("the handler only yields")

    def end(self, error) -> None:
        raise AssertionError("the handler only yields")

    def cancelled(self) -> bool:
        return False


async def ask(engine, checkpoint, parameters=None, **inputs):
    request = Request(
        inputs={name: array(value) for name, value in inputs.items()},
        transport=Nowhere(),
        parameters=parameters or {},
    )
    return [chunk async for chunk in ArHandler(engine, ChatTemplate(checkpoint))(request)]


def sampling(**settings) -> str:
    return json.dumps({"seed": 0, "ignore_eos": True, "max_tokens": 12, **settings})


async def test_a_raw_prompt_is_repeated_unless_declined_or_streamed(engine, checkpoint):
    plain = fold(await ask(engine, checkpoint, text_input="hello", sampling_parameters=sampling()))
    bare = fold(
        await ask(engine, checkpoint, text_input="hello", sampling_parameters=sampling(), exclude_input_in_output=True)
    )
    streamed = fold(await ask(engine, checkpoint, text_input="hello", sampling_parameters=sampling(), stream=True))
    assert text(plain, "text_output") == "hello" + text(bare, "text_output")
    assert text(streamed, "text_output") == text(bare, "text_output")
    assert len(bare["token_ids"]) == int(bare["num_output_tokens"][0]) == 12
    assert int(bare["num_input_tokens"][0]) == 5
    assert text(bare, "finish_reason") == "length"
    assert int(bare["offset"][0]) == 0
    assert "logprobs" not in bare and "hidden_states" not in bare and "cumulative_logprob" not in bare


async def test_a_stream_does_not_repeat_its_input(engine, checkpoint):
    with pytest.raises(InvalidRequest) as caught:
        await ask(engine, checkpoint, text_input="x", stream=True, exclude_input_in_output=False)
    assert caught.value.param == "exclude_input_in_output"


async def test_offsets_count_tokens_and_only_the_last_chunk_has_a_reason(engine, checkpoint):
    chunks = await ask(engine, checkpoint, text_input="x", sampling_parameters=sampling(), stream=True)
    at = 0
    for chunk in chunks:
        assert int(chunk["offset"][0]) == at
        at += len(chunk["token_ids"])
    assert [chunk["finish_reason"] for chunk in chunks] == [""] * (len(chunks) - 1) + ["length"]


async def test_what_is_asked_for_is_returned(engine, checkpoint):
    answer = fold(
        await ask(
            engine,
            checkpoint,
            prompt_token_ids=np.array([5, 6], np.int64),
            sampling_parameters=sampling(logprobs=2),
            return_cumulative_logprob=True,
            return_hidden_states=True,
            return_finish_reason=False,
        )
    )
    steps = json.loads(text(answer, "logprobs"))
    assert len(steps) == 12
    assert all(str(token) in step for token, step in zip(answer["token_ids"], steps, strict=True))
    assert set(steps[0][str(answer["token_ids"][0])]) == {"logprob", "rank", "decoded_token"}
    assert answer["hidden_states"].shape == (12, 96)
    assert answer["cumulative_logprob"].shape == (1,)
    assert "finish_reason" not in answer


async def test_messages_go_through_the_template(engine, checkpoint):
    messages = [{"role": "user", "content": "hi"}]
    chat = fold(await ask(engine, checkpoint, messages=json.dumps(messages), sampling_parameters=sampling()))
    raw = fold(
        await ask(
            engine,
            checkpoint,
            text_input=ChatTemplate(checkpoint).render(messages),
            sampling_parameters=sampling(),
            exclude_input_in_output=True,
        )
    )
    assert text(chat, "text_output") == text(raw, "text_output")


async def test_settings_may_come_as_request_parameters(engine, checkpoint):
    expected = fold(await ask(engine, checkpoint, text_input="x", sampling_parameters=sampling(temperature=0.5)))
    found = fold(
        await ask(
            engine,
            checkpoint,
            {"temperature": "0.5", "seed": 0, "ignore_eos": True, "max_tokens": 12},
            text_input="x",
        )
    )
    assert found["token_ids"].tolist() == expected["token_ids"].tolist()


async def test_a_drawn_seed_is_returned_and_repeats(engine, checkpoint):
    settings = {"ignore_eos": True, "max_tokens": 12}
    first = fold(await ask(engine, checkpoint, text_input="x", sampling_parameters=json.dumps(settings)))
    settings["seed"] = int(first["seed"][0])
    again = fold(await ask(engine, checkpoint, text_input="x", sampling_parameters=json.dumps(settings)))
    assert again["token_ids"].tolist() == first["token_ids"].tolist()


@pytest.mark.parametrize(
    ("inputs", "parameters", "param"),
    [
        ({}, {}, "text_input"),
        ({"text_input": "x", "messages": "[]"}, {}, "messages"),
        ({"text_input": ""}, {}, "text_input"),
        ({"messages": "{"}, {}, "messages"),
        ({"messages": "[]"}, {}, "messages"),
        ({"messages": json.dumps([{"role": "user", "content": "x" * 500}])}, {}, "messages"),
        ({"text_input": "x", "sampling_parameters": "{"}, {}, "sampling_parameters"),
        ({"text_input": "x", "sampling_parameters": "[]"}, {}, "sampling_parameters"),
        ({"text_input": "x", "sampling_parameters": '{"temperature": NaN}'}, {}, "temperature"),
        ({"text_input": "x", "sampling_parameters": '{"heat": 1}'}, {}, "heat"),
        ({"text_input": "x", "sampling_parameters": '{"seed": 1}'}, {"seed": 1}, "seed"),
        ({"text_input": np.array([b"a", b"b"], object)}, {}, "text_input"),
        ({"prompt_embeds": np.zeros((2, 3), np.float32)}, {}, "prompt_embeds"),
    ],
)
async def test_bad_input_is_named(engine, checkpoint, inputs, parameters, param):
    with pytest.raises(InvalidRequest) as caught:
        await ask(engine, checkpoint, parameters, **inputs)
    assert caught.value.param == param

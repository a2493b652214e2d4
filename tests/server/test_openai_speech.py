"""/v1/audio/speech of the running stack, with the official SDK."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

TEXT = "The first sentence is spoken now. The second one follows it."

SEED = {"seed": 7}


@pytest.fixture(scope="module")
def client(stack: Any) -> Any:
    with openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def decoded(data: bytes, format: str) -> tuple[np.ndarray, int]:
    if format == "pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / 32768, 24_000
    with av.open(io.BytesIO(data)) as container:
        rate = container.streams.audio[0].rate
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    samples = np.concatenate([frame.reshape(-1) for frame in frames])
    return samples / (32768 if samples.dtype.kind == "i" else 1), rate


def same(left: bytes, right: bytes) -> bool:
    """The same samples, but for the last bit: threads of the runtime may sum in another order."""
    first, second = (np.frombuffer(data, "<i2").astype(int) for data in (left, right))
    return len(first) == len(second) and int(np.abs(first - second).max()) <= 1


@pytest.mark.parametrize("format", ["wav", "pcm", "flac", "mp3", "opus", "aac"])
def test_every_format_holds_the_same_speech(client: Any, format: Any) -> None:
    pcm = client.audio.speech.create(model="hibari", voice="default", input=TEXT, response_format="pcm").content
    seconds = len(pcm) / 2 / 24_000
    assert seconds > 2
    answer = client.audio.speech.create(model="hibari", voice="default", input=TEXT, response_format=format)
    samples, rate = decoded(answer.content, format)
    assert len(samples) / rate == pytest.approx(seconds, abs=0.15)
    assert 0.005 < float(np.sqrt(np.mean(samples**2))) < 0.5


def test_speech_streams_and_joins_to_the_whole(client: Any) -> None:
    whole = client.audio.speech.create(
        model="hibari", voice="heart", input=TEXT, response_format="pcm", extra_body=SEED
    ).content
    with client.audio.speech.with_streaming_response.create(
        model="hibari", voice="heart", input=TEXT, response_format="pcm", extra_body=SEED
    ) as answer:
        chunks = list(answer.iter_bytes())
    assert same(b"".join(chunks), whole)
    assert len(chunks) > 1


def test_a_streamed_wav_is_open_ended(client: Any) -> None:
    data = client.audio.speech.create(model="hibari", voice="heart", input="Hello.", response_format="wav").content
    assert data[:8] == b"RIFF\xff\xff\xff\xff" and data[40:44] == b"\xff\xff\xff\xff"


def test_sse(client: Any) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="hibari", voice="heart", input=TEXT, response_format="pcm", stream_format="sse", extra_body=SEED
    ) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and done["type"] == "speech.audio.done"
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"] > 0
    whole = client.audio.speech.create(
        model="hibari", voice="heart", input=TEXT, response_format="pcm", extra_body=SEED
    ).content
    assert same(b"".join(base64.b64decode(event["audio"]) for event in deltas), whole)


def test_speed_changes_the_length(client: Any) -> None:
    lengths = [
        len(
            client.audio.speech.create(
                model="hibari", voice="heart", input=TEXT, response_format="pcm", speed=s
            ).content
        )
        for s in (0.5, 1.0, 2.0)
    ]
    assert lengths[0] > 1.5 * lengths[1] > 2 * lengths[2]


def test_the_seed_is_told(client: Any) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="hibari", voice="heart", input="Hello.", extra_body={"seed": 0}
    ) as answer:
        assert answer.headers["x-seed"] == "0" and answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": "  \n\t"}, 400, "input"),
        ({"input": "a" * 100_000}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": "\U0001f600"}, 400, "input"),
        ({"input": "\x00\x01"}, 400, "input"),
        ({"voice": "nobody"}, 404, "voice"),
        ({"model": "nothing"}, 404, "model"),
        ({"model": "whisper"}, 400, "model"),
        ({"response_format": "ogg"}, 400, "response_format"),
        ({"speed": 0}, 400, "speed"),
        ({"speed": 1e999}, 400, "speed"),
        ({"instructions": "Sing."}, 400, "instructions"),
        ({"pitch": 2}, 400, "pitch"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_the_next_request_is_fine(
    stack: Any, change: dict[str, Any], status: int, param: str
) -> None:
    good = {"model": "hibari", "input": "Hello.", "response_format": "pcm"}
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=stack.root_url, timeout=120, trust_env=False, headers=headers) as http:
        answer = http.post("/v1/audio/speech", content=json.dumps(good | change))
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
        assert param in answer.json()["error"]["message"] or param == "input"
        assert len(http.post("/v1/audio/speech", json=good).content) > 10_000


def test_odd_characters_among_words_are_spoken_around(client: Any) -> None:
    odd = "Hello \U0001f600 there\x07, caf\u00e9!"
    assert (
        len(client.audio.speech.create(model="hibari", voice="heart", input=odd, response_format="pcm").content)
        > 10_000
    )

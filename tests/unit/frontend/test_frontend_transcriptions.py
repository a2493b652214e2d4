"""POST /v1/audio/transcriptions over scripted pipelines."""

from __future__ import annotations

import asyncio
import io
import wave
from typing import Any

import numpy as np
import pytest


def clip(rate: int = 16_000, seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes((np.sin(np.arange(int(rate * seconds))) * 9000).astype("<i2").tobytes())
    return file.getvalue()


FILE = ("a.wav", clip())


async def test_json_text_and_subtitles(front: Any) -> None:
    create = front.openai.audio.transcriptions.create
    assert (await create(model="hearer", file=FILE)).text == "Hello there. General Kenobi."
    assert await create(model="hearer", file=FILE, response_format="text") == "Hello there. General Kenobi.\n"
    assert await create(model="hearer", file=FILE, response_format="srt") == (
        "1\n00:00:00,000 --> 00:00:01,250\nHello there.\n\n2\n00:00:01,500 --> 00:00:02,750\nGeneral Kenobi.\n"
    )
    assert await create(model="hearer", file=FILE, response_format="vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello there.\n\n00:00:01.500 --> 00:00:02.750\nGeneral Kenobi.\n"
    )
    assert front.last().inputs["audio"].size == 8_000


async def test_verbose_json_and_its_granularities(front: Any) -> None:
    create = front.openai.audio.transcriptions.create
    answer = await create(model="hearer", file=("a.wav", clip(48_000, 2.0)), response_format="verbose_json")
    assert (answer.language, answer.duration) == ("en", 2.0)
    assert [segment.text for segment in answer.segments] == ["Hello there. ", "General Kenobi."]
    assert answer.words is None and answer.usage.seconds == 2.0
    assert front.last().inputs["audio"].size == 32_000
    words = await create(model="hearer", file=FILE, response_format="verbose_json", timestamp_granularities=["word"])
    assert [word.word for word in words.words] == ["and", "so", "on"] * 2 and words.segments is None
    assert front.last().params["word_timestamps"] is True
    both = await create(
        model="hearer", file=FILE, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert both.words and both.segments


async def test_a_repeated_field_is_refused(front: Any) -> None:
    files = [("file", FILE), ("file", ("b.wav", clip()))]
    answer = await front.http.post("/v1/audio/transcriptions", data={"model": "hearer"}, files=files)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"
    assert "2 times" in answer.json()["error"]["message"]


async def test_stream(front: Any) -> None:
    stream = await front.openai.audio.transcriptions.create(model="hearer", file=FILE, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == "Hello there. General Kenobi."


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_request_is_read_to_its_end(front: Any, stream: str) -> None:
    """Leaving after the last words, before the end, would be a cancel that meets the end half-way."""
    fields = {"model": "hearer", "stream": stream, "prompt": "linger"}
    upload = front.http.post("/v1/audio/transcriptions", data=fields, files={"file": FILE})
    async with asyncio.timeout(30):
        asked = asyncio.create_task(upload)
        await front.triton.called(1)
        call = front.triton.calls[0]
        await call.running.wait()
        # By the time this one is through, the other would long have been left.
        await front.openai.audio.transcriptions.create(model="hearer", file=FILE)
        assert not asked.done() and not call.cancelled.is_set()
        call.release.set()
        assert (await asked).status_code == 200
        await call.ended.wait()
    assert not call.cancelled.is_set()


async def test_settings_reach_the_pipeline(front: Any) -> None:
    await front.openai.audio.transcriptions.create(
        model="hearer", file=FILE, language="en", prompt="Names: Kenobi.", temperature=0.5
    )
    assert front.last().params == {"language": "en", "prompt": "Names: Kenobi.", "temperature": 0.5}


@pytest.mark.parametrize(
    ("fields", "file", "param", "named"),
    [
        ({}, None, "file", "required"),
        ({"response_format": "diarized_json"}, FILE, "response_format", "verbose_json"),
        ({"timestamp_granularities[]": "word"}, FILE, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, FILE,
         "timestamp_granularities[0]", "'word'"),
        ({"temperature": "1.5"}, FILE, "temperature", "1"),
        ({"temperature": "nan"}, FILE, "temperature", "finite"),
        ({"stream": "true", "response_format": "srt"}, FILE, "response_format", "json"),
        ({"include[]": "logprobs"}, FILE, "include", "not supported"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, FILE, "chunking_strategy", "not supported"),
        ({"vad": "true"}, FILE, "vad", "unknown field"),
        ({"model": "speaker"}, FILE, "model", "hearer"),
        ({}, ("a.wav", b""), "file", "empty"),
        ({}, ("a.wav", clip()[:500]), "file", "cut short"),
        ({}, ("a.mp3", b"This is a text file. " * 50), "file", "audio"),
        ({}, ("a.wav", clip(2_000)), "file", "2000"),
        ({}, ("a.wav", clip(400_000, 0.1)), "file", "400000"),
    ],
)  # fmt: skip
async def test_bad_fields_and_files_are_named(
    front: Any, fields: dict[str, str], file: Any, param: str, named: str
) -> None:
    answer = await front.http.post(
        "/v1/audio/transcriptions", data={"model": "hearer"} | fields, files={"file": file} if file else {"x": b""}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert named in error["message"]
    good = await front.http.post("/v1/audio/transcriptions", data={"model": "hearer"}, files={"file": FILE})
    assert good.status_code == 200


async def test_audio_beyond_the_limit_is_refused(run: Any) -> None:
    async with run(max_audio_seconds=1.0) as front:
        for seconds, status in ((0.9, 200), (1.1, 400)):
            answer = await front.http.post(
                "/v1/audio/transcriptions", data={"model": "hearer"}, files={"file": ("a", clip(8_000, seconds))}
            )
            assert answer.status_code == status, answer.text

"""Both clients against a KServe server: what they send, what they make of the answers, and that leaving cancels."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from omni_client import AsyncClient, Client, audio, requests
from omni_runtime.errors import DeadlineExceeded, InvalidRequest, NotFound, OmniError, StageUnavailable

if TYPE_CHECKING:
    from conftest import SmallServer

RATE = 16_000
WAIT = 10.0
CLIP = np.full(3_200, 0.1, np.float32)


class Sync:
    """The sync client behind the async client's interface, so that one test runs both."""

    def __init__(self, url: str) -> None:
        self._client = Client(url, timeout=WAIT)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("stream"):
                return _Chunks(method(*args, **kwargs))
            return asyncio.to_thread(method, *args, **kwargs)

        return call


class _Chunks:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> Any:
        chunk = await asyncio.to_thread(next, self._stream, None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def collect(self) -> Any:
        return await asyncio.to_thread(self._stream.collect)


@pytest.fixture(params=["async", "sync"])
async def client(request: pytest.FixtureRequest, server: SmallServer) -> Any:
    client: Any = AsyncClient(server.url, timeout=WAIT) if request.param == "async" else Sync(server.url)
    yield client
    await client.close()


def params(server: SmallServer) -> Any:
    return json.loads(server.requests[-1][1]["params"][0])


async def test_speak(client: Any, server: SmallServer) -> None:
    speech = await client.speak("one three", voice="bob", speed=1.5, seed=0)
    assert server.requests[-1][0] == "talker"
    assert params(server) == {"voice": "bob", "speed": 1.5, "seed": 0}
    assert (speech.sample_rate, speech.audio.size, speech.text, speech.seed) == (RATE, 8 * 160, "onethree", 0)
    assert (speech.usage.input_tokens, speech.usage.total_tokens) == (1, 3)
    assert speech.duration == 0.08
    chunks = [chunk async for chunk in client.speak("one three", stream=True)]
    assert server.requests[-1][1]["stream"].tolist() == [True]
    assert [(chunk.text, chunk.offset) for chunk in chunks] == [("one", 0), ("three", 480)]
    np.testing.assert_array_equal(np.concatenate([chunk.audio for chunk in chunks]), speech.audio)
    np.testing.assert_array_equal((await client.speak("one three", stream=True).collect()).audio, speech.audio)


async def test_speech_is_saved_in_the_format_of_its_name(client: Any, tmp_path: Path) -> None:
    speech = await client.speak("one")
    for extension in ("wav", "mp3", "ogg"):
        speech.save(tmp_path / f"a.{extension}")
        assert audio.decode(tmp_path / f"a.{extension}")[0].size
    with pytest.raises(InvalidRequest, match=r"'.*a\.doc' ends in no format"):
        speech.save(tmp_path / "a.doc")


async def test_transcribe(client: Any, server: SmallServer, tmp_path: Path) -> None:
    path = tmp_path / "clip.flac"
    path.write_bytes(audio.encode(CLIP, RATE, "flac"))
    for source, rate in ((path, None), (str(path), None), (path.read_bytes(), None), (CLIP, RATE)):
        transcript = await client.transcribe(source, rate, word_timestamps=True)
        inputs = server.requests[-1][1]
        np.testing.assert_allclose(inputs["audio"], CLIP, atol=1e-4)
        assert inputs["audio_sample_rate"].tolist() == [RATE]
        assert params(server) == {"word_timestamps": True}
    assert transcript.text == "One. Two."
    assert [segment.text for segment in transcript.segments] == [" One.", " Two."]
    assert transcript.segments[1].words[0].start == 1
    assert (transcript.language, transcript.duration, transcript.usage.seconds) == ("en", pytest.approx(0.2), 0.2)
    assert "00:00:01,000 --> 00:00:02,000" in transcript.srt()
    assert "00:00:01.000 --> 00:00:02.000" in transcript.vtt()
    chunks = [chunk async for chunk in client.transcribe(path, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == transcript.text


async def test_chat(client: Any, server: SmallServer) -> None:
    reply = await client.chat("hello", max_tokens=5, stop=["x"], logprobs=1)
    model, inputs = server.requests[-1]
    assert model == "writer"
    assert json.loads(inputs["messages"][0]) == [{"role": "user", "content": "hello"}]
    assert params(server) == {"max_tokens": 5, "stop": ["x"], "logprobs": 1}
    assert (reply.text, reply.finish_reason, reply.token_ids) == ("You said hello.", "stop", (0, 1, 2))
    assert reply.logprobs[2]["2"]["rank"] == 1
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (4, 3)
    assert reply.speech() is None
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "there"}]
    chunks = [chunk async for chunk in client.chat(messages, stream=True)]
    assert json.loads(server.requests[-1][1]["messages"][0]) == messages
    assert [chunk.finish_reason for chunk in chunks] == ["", "", "stop"]


async def test_spoken_chat(client: Any, server: SmallServer) -> None:
    reply = await client.chat(audio=CLIP, sample_rate=RATE)
    model, inputs = server.requests[-1]
    assert model == "companion"
    assert inputs["audio_lengths"].tolist() == [3_200]
    part = {"type": "input_audio", "input_audio": {"tensor": "audio", "index": 0}}
    assert json.loads(inputs["messages"][0]) == [{"role": "user", "content": [part]}]
    assert (reply.text, reply.input_text, reply.audio.size) == ("Hm.", "what was heard", 1_600)
    assert reply.speech().duration == 0.1
    reply = await client.chat("say it", modalities=["text", "audio"])
    assert server.requests[-1][0] == "companion"
    quiet = await client.chat("listen", audio=audio.encode(CLIP, RATE, "wav"), modalities=["text"])
    content = json.loads(server.requests[-1][1]["messages"][0])[0]["content"]
    assert content == [{"type": "text", "text": "listen"}, part]
    assert quiet.audio.size == 0


async def test_openai_parts_become_tensors_at_one_rate(client: Any, server: SmallServer) -> None:
    def part(rate: int) -> dict[str, Any]:
        data = base64.b64encode(audio.encode(np.full(rate // 5, 0.1, np.float32), rate, "wav")).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}

    await client.chat([{"role": "user", "content": [part(8_000), part(24_000)]}])
    inputs = server.requests[-1][1]
    assert inputs["audio_lengths"].tolist() == [3_200, 3_200]
    assert inputs["audio_sample_rate"].tolist() == [16_000]
    content = json.loads(inputs["messages"][0])[0]["content"]
    assert [entry["input_audio"]["index"] for entry in content] == [0, 1]


async def test_models_and_readiness(client: Any, server: SmallServer) -> None:
    found = {model.name: model for model in await client.models()}
    assert set(found) == {"talker", "listener", "writer", "companion"}
    assert found["talker"].voices == ("ann", "bob")
    assert found["companion"].audio
    assert await client.ready()
    assert await client.ready("talker")
    server.down.add("talker_stage")
    assert not await client.ready("talker")
    assert not await client.ready("no such pipeline")
    with pytest.raises(
        NotFound, match=r"no ready text_to_speech pipeline; it has talker \(text_to_speech, not ready\)"
    ):
        await client.speak("hello")


BAD = {
    "an empty text": (lambda c: c.speak(" "), "text"),
    "no text": (lambda c: c.speak(None), "text"),
    "an unknown setting": (lambda c: c.speak("x", pitch=2), "pitch"),
    "a setting that is not finite": (lambda c: c.speak("x", speed=float("nan")), "speed"),
    "samples without a rate": (lambda c: c.transcribe(CLIP), "sample_rate"),
    "stereo samples": (lambda c: c.transcribe(np.zeros((2, 9), np.float32), RATE), "audio"),
    "integer samples": (lambda c: c.transcribe(np.zeros(9, np.int64), RATE), "audio"),
    "a file that is not audio": (lambda c: c.transcribe(b"text" * 99), "audio"),
    "a file that is not there": (lambda c: c.transcribe("/nowhere.wav"), "audio"),
    "base64 that is none": (
        lambda c: c.chat([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "*"}}]}]),
        "messages",
    ),
}


@pytest.mark.parametrize("kind", BAD)
async def test_bad_input_is_named(client: Any, kind: str) -> None:
    call, param = BAD[kind]
    with pytest.raises(InvalidRequest) as caught:
        await call(client)
    assert caught.value.param == param
    assert (await client.speak("fine")).audio.size


async def test_a_deadline_ends_a_request(client: Any, server: SmallServer) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.speak("forever", timeout=0.3)


async def test_no_server(unused_tcp_port: int) -> None:
    async with AsyncClient(f"localhost:{unused_tcp_port}", timeout=2) as client:
        assert not await client.ready()
        assert not await client.ready("talker")
        with pytest.raises(StageUnavailable):
            await client.speak("hello")


async def left(server: SmallServer) -> None:
    assert await asyncio.to_thread(server.cancelled.wait, WAIT)


async def test_leaving_an_async_stream_cancels(server: SmallServer) -> None:
    async with AsyncClient(server.url) as client:
        async for chunk in client.speak("forever", stream=True):
            assert chunk.text == "forever"
            break
        gc.collect()
        await left(server)
        server.cancelled.clear()
        async with client.chat("forever", stream=True) as stream:
            await anext(stream)
        await left(server)
        server.cancelled.clear()
        stream = client.speak("forever", stream=True)
        await anext(stream)
        await stream.aclose()
        await left(server)
        server.cancelled.clear()
        seen = len(server.requests)
        task = asyncio.create_task(client.speak("forever"))
        while len(server.requests) == seen:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await left(server)


def test_leaving_a_sync_stream_cancels(server: SmallServer) -> None:
    with Client(server.url) as client:
        for chunk in client.speak("forever", stream=True):
            assert chunk.text == "forever"
            break
        gc.collect()
        assert server.cancelled.wait(WAIT)
        server.cancelled.clear()
        with client.chat("forever", stream=True) as stream:
            next(stream)
        assert server.cancelled.wait(WAIT)


def test_the_default_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_URL", raising=False)
    assert Client().url == "localhost:8001"
    monkeypatch.setenv("OMNI_URL", "elsewhere:7")
    assert Client().url == AsyncClient().url == "elsewhere:7"
    assert Client("here:1").url == "here:1"


def test_int16_samples_are_scaled() -> None:
    samples, rate = requests.samples_of(np.array([16384, -32768], np.int16), 8_000)
    assert samples.tolist() == [0.5, -1.0]
    assert rate == 8_000


def test_errors_are_the_runtime_s() -> None:
    assert issubclass(NotFound, OmniError)

"""The SDK and the command line against the real stack."""

import asyncio
import json
import subprocess

import numpy as np
import pytest
from omni_client import AsyncClient, Client
from omni_client.audio import decode, encode
from omni_runtime.errors import InvalidRequest, NotFound
from omni_runtime.kserve import text
from omni_runtime.kserve_sync import SyncConnection

from tests.conftest import COMMAND

TWO = "The first sentence is here. And this is the second one."


@pytest.fixture(scope="module")
def client(stack):
    with Client(stack.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def spoken(client):
    return client.speak("What is the capital of France?", seed=2)


def command(stack, *arguments, **options):
    return subprocess.run(
        [COMMAND, *arguments, "--url", stack.grpc_url], capture_output=True, timeout=120, check=False, **options
    )


def test_a_stream_of_speech_is_the_whole_in_chunks(client):
    whole = client.speak(TWO, seed=4)
    chunks = list(client.speak(TWO, seed=4, stream=True))
    assert len(chunks) == 2
    np.testing.assert_allclose(np.concatenate([chunk.audio for chunk in chunks]), whole.audio, rtol=0, atol=1e-5)
    assert whole.seed == 4


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "aac"])
def test_any_audio_file_is_transcribed(client, spoken, format, tmp_path):
    path = tmp_path / f"question.{format}"
    path.write_bytes(encode(spoken.audio, spoken.sample_rate, format))
    assert "capital of France" in client.transcribe(path).text


def test_words_have_times_inside_their_segment(client, spoken):
    transcript = client.transcribe(spoken.audio, spoken.sample_rate, word_timestamps=True)
    words = [word for segment in transcript.segments for word in segment.words]
    assert len(words) == 6
    assert all(0 <= word.start <= word.end <= transcript.duration for word in words)
    assert [word.start for word in words] == sorted(word.start for word in words)


def test_chat_streams_what_it_says_at_once(client):
    whole = client.chat("What is the capital of France?", temperature=0.0, max_tokens=20, seed=0)
    chunks = list(client.chat("What is the capital of France?", temperature=0.0, max_tokens=20, seed=0, stream=True))
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.usage.output_tokens <= 20


def test_a_spoken_question_gets_a_spoken_answer(client, spoken):
    reply = client.chat(
        audio=spoken.audio, sample_rate=spoken.sample_rate, model="voice_chat", temperature=0.0, max_tokens=20
    )
    assert "Paris" in reply.text
    assert "Paris" in client.transcribe(reply.audio, reply.sample_rate).text


def test_leaving_a_stream_early_ends_the_work(client, stack):
    with client.speak(f"{TWO} " * 200, stream=True) as chunks:
        next(chunks)
    connection = SyncConnection(stack.grpc_url)
    for _ in range(500):
        (status,) = connection.stream("hibari", {"control": "status"}, outputs=["status"])
        if json.loads(text(status, "status"))["running"] == 0:
            break
    else:
        pytest.fail("the request still runs")
    connection.close()


def test_errors_name_the_field_or_the_model(client):
    with pytest.raises(InvalidRequest) as refused:
        client.speak(TWO, speed=9)
    assert refused.value.param == "speed"
    with pytest.raises(NotFound, match="nobody"):
        client.speak(TWO, model="nobody")


async def test_the_async_client_does_the_same_at_once(stack):
    async with AsyncClient(stack.grpc_url) as client:
        speeches = await asyncio.gather(*(client.speak(TWO, seed=seed) for seed in range(4)))
        again = await client.speak(TWO, seed=3)
    np.testing.assert_allclose(speeches[3].audio, again.audio, rtol=0, atol=1e-5)


def test_say_and_transcribe(stack, tmp_path):
    path = tmp_path / "morning.mp3"
    assert command(stack, "say", "Good morning to everybody.", "-o", str(path)).returncode == 0
    heard = command(stack, "transcribe", str(path), "--format", "srt")
    assert heard.returncode == 0
    assert b"-->" in heard.stdout
    assert b"Good morning to everybody" in heard.stdout


def test_say_reads_stdin_and_writes_stdout(stack, tmp_path):
    said = command(stack, "say", "-", "-o", "-", "--format", "wav", input=b"Good evening.")
    path = tmp_path / "evening.wav"
    path.write_bytes(said.stdout)
    audio, rate = decode(path)
    assert rate == 24_000
    assert len(audio) > rate / 2


def test_chat_models_and_status(stack):
    chat = command(stack, "chat", "What is the capital of France?", "--temperature", "0", "--max-tokens", "20")
    assert b"Paris" in chat.stdout
    assert {b"hibari", b"whisper", b"smollm2", b"voice_chat"} <= set(command(stack, "models").stdout.split())
    assert command(stack, "status").returncode == 0


def test_a_refusal_is_one_line_and_status_1(stack, tmp_path):
    empty = tmp_path / "empty.wav"
    empty.write_bytes(b"")
    for arguments in (("transcribe", str(empty)), ("say", " "), ("say", "Hi", "--speed", "9")):
        refused = command(stack, *arguments)
        assert refused.returncode == 1, arguments
        assert len(refused.stderr.decode().strip().splitlines()) == 1, refused.stderr

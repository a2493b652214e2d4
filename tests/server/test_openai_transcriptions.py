"""/v1/audio/transcriptions of the running stack, with the official SDK."""

from __future__ import annotations

import io
import re
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import psutil
import pytest

SAID = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def client(stack: Any) -> Any:
    with openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0, timeout=180) as client:
        yield client


@pytest.fixture(scope="module")
def spoken(client: Any) -> bytes:
    return bytes(client.audio.speech.create(model="hibari", voice="heart", input=SAID, response_format="flac").content)


def wav(samples: Any, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes(np.asarray(samples, "<i2").tobytes())
    return file.getvalue()


def words(text: str) -> list[str]:
    return "".join(c for c in text.lower() if c.isalpha() or c == " ").split()


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "aac"])
def test_what_was_spoken_is_heard(client: Any, format: Any) -> None:
    data = client.audio.speech.create(model="hibari", voice="heart", input=SAID, response_format=format).content
    heard = client.audio.transcriptions.create(model="whisper", file=(f"a.{format}", data)).text
    assert len(set(words(SAID)) & set(words(heard))) >= 7, heard


def test_formats_agree(client: Any, spoken: bytes) -> None:
    def heard(format: Any, **given: Any) -> Any:
        return client.audio.transcriptions.create(
            model="whisper", file=("a.flac", spoken), response_format=format, **given
        )

    plain = heard("json").text
    assert heard("text").strip() == plain.strip()
    verbose = heard("verbose_json", timestamp_granularities=["word", "segment"])
    assert verbose.text == plain and verbose.language == "en"
    assert verbose.duration == pytest.approx(verbose.usage.seconds, abs=0.01)
    assert 0 <= verbose.segments[0].start < verbose.segments[-1].end <= verbose.duration + 0.1
    assert words(" ".join(word.word for word in verbose.words)) == words(plain)
    assert all(word.start <= word.end for word in verbose.words)
    assert heard("srt").startswith("1\n00:00:0") and heard("vtt").startswith("WEBVTT\n\n00:00:0")
    assert heard("verbose_json").words is None


def test_the_stream_joins_to_the_whole(client: Any, spoken: bytes) -> None:
    whole = client.audio.transcriptions.create(model="whisper", file=("a.flac", spoken)).text
    events = list(client.audio.transcriptions.create(model="whisper", file=("a.flac", spoken), stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole
    assert "".join(event.delta for event in events[:-1]) == whole


def test_silence_has_no_text(client: Any) -> None:
    answer = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", wav(np.zeros(48_000), 16_000)), response_format="verbose_json"
    )
    assert answer.text == "" and answer.segments == [] and answer.duration == pytest.approx(3.0, abs=0.01)


def test_an_hour_of_silence_has_no_text(client: Any, stack: Any, record_property: Any) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=48_000)
        stream.codec_context.layout, stream.codec_context.format = "stereo", "s16"
        second = np.zeros((1, 2 * 48_000), np.int16)
        for k in range(3_600):
            frame = av.AudioFrame.from_ndarray(second, format="s16", layout="stereo")
            frame.sample_rate, frame.pts = 48_000, k * 48_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    answer = client.audio.transcriptions.create(
        model="whisper", file=("hour.flac", file.getvalue()), response_format="verbose_json"
    )
    assert answer.text == "" and answer.duration == pytest.approx(3600, abs=0.1)
    if stack.pid:
        for process in [psutil.Process(stack.pid), *psutil.Process(stack.pid).children(recursive=True)]:
            status = Path(f"/proc/{process.pid}/status").read_text()
            if (found := re.search(r"VmHWM:\s+(\d+) kB", status)) is None:
                continue  # it has ended
            peak = int(found[1]) // 1024
            record_property(f"peak_mib {process.pid} {process.name()}", peak)
            print(f"peak of {process.name()} ({process.pid}): {peak} MiB")


@pytest.mark.parametrize(
    ("file", "given", "param"),
    [
        (b"", {}, "file"),
        (b"This is a text file. " * 100, {}, "file"),
        (wav(np.ones(5_000), 16_000)[:600], {}, "file"),
        (wav(np.ones(5_000), 3_999), {}, "file"),
        (wav(np.ones(5_000), 384_001), {}, "file"),
        (None, {"language": "de"}, "language"),
        (None, {"temperature": 2}, "temperature"),
        (None, {"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        (None, {"extra_body": {"beam": 1}}, "beam"),
    ],
)
def test_bad_input_is_named_and_the_next_request_is_fine(
    client: Any, spoken: bytes, file: bytes | None, given: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.transcriptions.create(model="whisper", file=("a.mp3", spoken if file is None else file), **given)
    assert refused.value.param == param
    assert client.audio.transcriptions.create(model="whisper", file=("a.flac", spoken)).text

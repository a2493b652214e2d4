"""Every format out and back in, streamed and whole; every bad file refused by name."""

from __future__ import annotations

import io
import wave
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from omni_client import audio
from omni_runtime.errors import Internal, InvalidRequest

FORMATS = tuple(audio.MEDIA_TYPES)
LOSSLESS = ("wav", "flac")
CONTAINERS = (*LOSSLESS, "mp3", "opus", "aac")


def tone(seconds: float = 1.5, rate: int = 24_000) -> NDArray[np.float32]:
    """A chirp: it aligns with itself at one lag only."""
    time = np.arange(int(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * (200 * time + 150 * time**2))).astype(np.float32)


def streamed(samples: NDArray[np.float32], format: str, cuts: list[int], rate: int = 24_000) -> bytes:
    encoder = audio.Encoder(format, rate)
    edges = [0, *sorted(cuts), samples.size]
    return b"".join(encoder.push(samples[a:b]) for a, b in pairwise(edges)) + encoder.close()


def agreement(reference: NDArray[np.float32], heard: NDArray[np.float32]) -> float:
    """The normalised correlation at the best lag of at most 0.2 s."""
    size = 1 << (reference.size + heard.size).bit_length()
    product = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(reference, size)), size)
    lags = np.concatenate([product[:6_000], product[-6_000:]])
    return float(lags.max() / (np.linalg.norm(reference) * np.linalg.norm(heard)))


def media(container: str, codec: str, samples: NDArray[np.float32], rate: int = 24_000) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.codec_context.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def written(samples: NDArray[np.float32], rate: int, format: str, subtype: str) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rate", [8_000, 24_000, 44_100, 22_000])
@pytest.mark.parametrize("format", CONTAINERS)
def test_round_trip(format: str, rate: int, whole: bool) -> None:
    samples = tone(rate=rate)
    data = audio.encode(samples, rate, format) if whole else streamed(samples, format, [100, 7_000, 7_001], rate)
    heard, heard_rate = audio.decode(data)
    assert heard.dtype == np.float32
    assert heard.size / heard_rate == pytest.approx(1.5, abs=0.2)
    resampled = audio.decode(data, sample_rate=rate)[0]
    if format in LOSSLESS:
        assert heard_rate == rate
        np.testing.assert_allclose(heard, samples, atol=1 / 32_000)
    else:
        assert agreement(samples, resampled) > 0.97


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 12_000), max_size=12), format=st.sampled_from(FORMATS))
def test_the_chunk_schedule_is_invisible(cuts: list[int], format: str) -> None:
    samples = tone(0.5)
    data = streamed(samples, format, cuts)
    assert data == streamed(samples, format, [])
    if format == "pcm":
        assert data == audio.encode(samples, 24_000, "pcm")
    if format == "wav":
        assert data[44:] == audio.encode(samples, 24_000, "wav")[44:]


def test_wav_headers() -> None:
    samples = tone()
    whole, stream = audio.encode(samples, 24_000, "wav"), streamed(samples, "wav", [5])
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (samples.size, 24_000, 1)
    assert stream[4:8] == stream[40:44] == b"\xff\xff\xff\xff"
    assert audio.decode(stream)[0].size == samples.size


@pytest.mark.parametrize("format", CONTAINERS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_file_without_samples_is_valid(format: str, whole: bool) -> None:
    nothing = np.zeros(0, np.float32)
    data = audio.encode(nothing, 24_000, format) if whole else audio.Encoder(format, 24_000).close()
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.audio[0].codec_context.sample_rate > 0


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_leave_while_the_stream_is_open(format: str) -> None:
    encoder = audio.Encoder(format, 24_000)
    pushed = b"".join(encoder.push(tone(0.02)) for _ in range(50))
    rest = encoder.close()
    assert len(pushed) > 3 * len(rest)
    assert encoder.close() == b""
    with pytest.raises(ValueError, match="closed"):
        encoder.push(tone(0.02))


def test_loud_samples_are_clipped_and_nan_is_a_fault() -> None:
    pcm = np.frombuffer(audio.encode(np.float32([2, -3, 1, -1, 0.5]), 24_000, "pcm"), "<i2")
    assert pcm.tolist() == [32767, -32767, 32767, -32767, 16384]
    for format in FORMATS:
        with pytest.raises(Internal, match="finite"):
            audio.Encoder(format, 24_000).push(np.float32([0, np.nan]))


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'tiff'.*wav, pcm, flac") as caught:
        audio.Encoder("tiff", 24_000)
    assert caught.value.param == "response_format"


READABLE = {
    "wav16": lambda x: written(x, 24_000, "WAV", "PCM_16"),
    "wav8": lambda x: written(x, 24_000, "WAV", "PCM_U8"),
    "wav24": lambda x: written(x, 24_000, "WAV", "PCM_24"),
    "wav float": lambda x: written(x, 24_000, "WAV", "FLOAT"),
    "wav double": lambda x: written(x, 24_000, "WAV", "DOUBLE"),
    "wav ulaw": lambda x: written(x, 24_000, "WAV", "ULAW"),
    "flac": lambda x: written(x, 24_000, "FLAC", "PCM_24"),
    "aiff": lambda x: written(x, 24_000, "AIFF", "PCM_16"),
    "mp3": lambda x: written(x, 24_000, "MP3", "MPEG_LAYER_III"),
    "mp3 stream": lambda x: streamed(x, "mp3", [7_000]),
    "aac stream": lambda x: streamed(x, "aac", [7_000]),
    "opus stream": lambda x: streamed(x, "opus", [7_000]),
    "ogg vorbis": lambda x: written(x, 24_000, "OGG", "VORBIS"),
    "ogg opus": lambda x: written(x, 24_000, "OGG", "OPUS"),
    "m4a": lambda x: media("ipod", "aac", x),
    "mp4": lambda x: media("mp4", "aac", x),
    "aac": lambda x: media("adts", "aac", x),
    "webm": lambda x: media("webm", "libopus", x),
    "mkv flac": lambda x: media("matroska", "flac", x),
}


@pytest.mark.parametrize("kind", READABLE)
def test_files_a_person_has(kind: str, tmp_path: Path) -> None:
    samples = tone()
    path = tmp_path / "clip"
    path.write_bytes(READABLE[kind](samples))
    heard, rate = audio.decode(path)
    assert heard.size / rate == pytest.approx(1.5, abs=0.1)
    assert agreement(samples, audio.decode(path, sample_rate=24_000)[0]) > 0.97
    np.testing.assert_array_equal(heard, audio.decode(path.read_bytes())[0])


@pytest.mark.parametrize("channels", [2, 6, 8])
def test_channels_are_averaged(channels: int) -> None:
    gains = np.linspace(0.2, 1, channels, dtype=np.float32)
    heard, _ = audio.decode(written(tone()[:, None] * gains, 24_000, "WAV", "FLOAT"))
    np.testing.assert_allclose(heard, tone() * gains.mean(), atol=1e-6)


def raw_wav(rate: int, samples: NDArray[np.int16]) -> bytes:
    return audio.wav_header(rate, samples.nbytes) + samples.tobytes()


BAD = {
    "zero bytes": (b"", "empty"),
    "a text file": (b"This is not an mp3 file.\n" * 400, "not audio"),
    "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "not audio"),
    "a concat script": (b"ffconcat version 1.0\nfile /etc/passwd\n", "not audio"),
    "random bytes": (np.random.default_rng(0).bytes(20_000), "not audio|no audio"),
    "nan": (written(np.float32([0, np.nan] * 5_000), 24_000, "WAV", "FLOAT"), "finite"),
    "inf": (written(np.float32([0, np.inf] * 5_000), 24_000, "WAV", "FLOAT"), "finite"),
    "a low rate": (raw_wav(3_999, np.zeros(8_000, np.int16)), "3999 Hz"),
    "a high rate": (raw_wav(384_001, np.zeros(8_000, np.int16)), "384001 Hz"),
    "no samples": (audio.encode(np.zeros(0, np.float32), 24_000, "wav"), "no audio"),
    "an unknown codec": (
        audio.wav_header(24_000, 9_000)[:20] + b"\x99\x99" + audio.wav_header(24_000, 9_000)[22:] + bytes(9_000),
        "codec that is not known",
    ),
    "nine channels": (written(np.zeros((9_000, 9), np.float32), 24_000, "WAV", "FLOAT"), "9 channels"),
    "doubles beyond float": (written(np.float64([0, 1e300] * 5_000), 24_000, "WAV", "DOUBLE"), "finite"),
    "a header alone": (audio.encode(tone(), 24_000, "wav")[:40], "cut short"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_by_name(kind: str) -> None:
    data, message = BAD[kind]
    with pytest.raises(InvalidRequest, match=message) as caught:
        audio.decode(data, param="input_audio")
    assert caught.value.param == "input_audio"


def test_a_video_without_sound_is_refused() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(3):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))))
        output.mux(stream.encode(None))
    with pytest.raises(InvalidRequest, match="no audio"):
        audio.decode(buffer.getvalue())


@pytest.mark.parametrize("share", [0.3, 0.5, 0.77])
@pytest.mark.parametrize("kind", READABLE)
def test_files_cut_short_are_refused(kind: str, share: float) -> None:
    data = READABLE[kind](tone(4))
    with pytest.raises(InvalidRequest, match="cut short"):
        audio.decode(data[: int(len(data) * share)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.wav: No such file"):
        audio.decode(tmp_path / "none.wav")


def test_decoding_stops_at_the_limit() -> None:
    data = audio.encode(np.zeros(24_000 * 60, np.float32), 24_000, "flac")
    decoder = audio.Decoder(data, max_seconds=10)
    seen = 0
    with pytest.raises(InvalidRequest, match="limit of 10 seconds"):
        for block in decoder:
            seen += block.size
    assert seen <= 240_000
    assert audio.decode(data, max_seconds=60)[0].size == 24_000 * 60

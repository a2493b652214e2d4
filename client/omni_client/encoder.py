"""Samples to audio files, as they arrive: wav, pcm, flac, mp3, opus (in Ogg) and aac (ADTS).

`Encoder` never seeks back, so what `push` returns can be sent at once. Rates that a codec does not have are resampled
to the next one that it has (opus knows 8, 12, 16, 24 and 48 kHz only).
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from omni_runtime.errors import Internal, InvalidRequest

MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "wav": "audio/wav",
        "pcm": "audio/pcm",
        "flac": "audio/flac",
        "mp3": "audio/mpeg",
        "opus": "audio/ogg",
        "aac": "audio/aac",
    }
)
EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {
        "wav": "wav",
        "pcm": "pcm",
        "raw": "pcm",
        "flac": "flac",
        "mp3": "mp3",
        "opus": "opus",
        "ogg": "opus",
        "aac": "aac",
    }
)
MIN_RATE, MAX_RATE = 4_000, 384_000
_OPEN_ENDED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Codec:
    """How PyAV writes one format. `rates` empty means any; `options` go to the muxer when it streams."""

    container: str
    codec: str
    sample_format: str
    rates: tuple[int, ...] = ()
    bit_rate: int | None = None
    options: tuple[tuple[str, str], ...] = ()


_MPEG_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_CODECS: Mapping[str, _Codec] = MappingProxyType(
    {
        "flac": _Codec("flac", "flac", "s16"),
        # No Xing frame in a stream: it would hold sizes which are not known yet.
        "mp3": _Codec("mp3", "libmp3lame", "fltp", _MPEG_RATES, 96_000, (("write_xing", "0"), ("id3v2_version", "0"))),
        # A page of 60 ms instead of a second: what was spoken leaves at once.
        "opus": _Codec(
            "ogg", "libopus", "flt", (8_000, 12_000, 16_000, 24_000, 48_000), 48_000, (("page_duration", "60000"),)
        ),
        "aac": _Codec("adts", "aac", "fltp", (*_MPEG_RATES, 64_000, 88_200, 96_000), 96_000),
    }
)


def to_pcm16(samples: ArrayLike) -> bytes:
    """Float samples [n] to s16le: clipped to [-1, 1], rounded to the nearest step. Internal when one is not finite."""
    return bytes((_finite(samples).clip(-1.0, 1.0) * 32767.0).round().astype("<i2").tobytes())


def _finite(samples: ArrayLike) -> NDArray[np.float32]:
    block = np.asarray(samples, dtype=np.float32).reshape(-1)
    if not np.isfinite(block).all():
        raise Internal("the audio to encode holds a sample that is not a finite number")
    return block


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """The 44 bytes before s16le mono samples; without `data_bytes` the sizes are open-ended (0xFFFFFFFF)."""
    size, whole = (_OPEN_ENDED, _OPEN_ENDED) if data_bytes is None else (data_bytes, data_bytes + 36)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + form + struct.pack("<4sI", b"data", size)


class Encoder:
    """A mono stream of float samples in [-1, 1] at `sample_rate` Hz, written as `format`.

    `push` returns the bytes that are ready (perhaps none), `close` the rest. Samples beyond [-1, 1] are clipped, ones
    that are not finite raise Internal (they are a fault of the model, not of the caller). InvalidRequest for an unknown
    `format`, naming `param`.
    """

    def __init__(self, format: str, sample_rate: int, *, param: str = "response_format") -> None:
        check_format(format, param)
        if not MIN_RATE <= sample_rate <= MAX_RATE:
            fault = f"a sample rate of {sample_rate} Hz is not between {MIN_RATE} and {MAX_RATE}"
            raise InvalidRequest(fault, param="sample_rate")
        self.format, self.sample_rate = format, sample_rate
        self._muxer = _Muxer(_CODECS[format], sample_rate, seekable=False) if format in _CODECS else None
        self._header = wav_header(sample_rate) if format == "wav" else b""
        self._closed = False

    def push(self, samples: ArrayLike) -> bytes:
        if self._closed:
            raise ValueError("the encoder is closed")
        if self._muxer is not None:
            return self._muxer.push(_finite(samples))
        header, self._header = self._header, b""
        return header + to_pcm16(samples)

    def close(self) -> bytes:
        """The last bytes of the file. A second call returns nothing."""
        if self._closed:
            return b""
        self._closed = True
        return self._muxer.close() if self._muxer is not None else self._header


def check_format(format: str, param: str = "response_format") -> None:
    """InvalidRequest unless `format` is one of MEDIA_TYPES."""
    if format not in MEDIA_TYPES:
        raise InvalidRequest(f"{format!r} is not an audio format; there are {', '.join(MEDIA_TYPES)}", param=param)


def format_of(path: str | os.PathLike[str], param: str = "output") -> str:
    """The format that a file's extension names; InvalidRequest for one that is not written."""
    extension = os.path.splitext(path)[1].removeprefix(".").lower()  # noqa: PTH122 (a name, perhaps not a file)
    if extension not in EXTENSIONS:
        known = ", ".join(f".{known}" for known in EXTENSIONS)
        raise InvalidRequest(f"{os.fspath(path)!r} ends in no format that is written; there are {known}", param=param)
    return EXTENSIONS[extension]


def encode(samples: ArrayLike, sample_rate: int, format: str, *, param: str = "response_format") -> bytes:
    """A whole file of float samples [n] at `sample_rate` Hz, with its true sizes in the header."""
    encoder = Encoder(format, sample_rate, param=param)
    if format in _CODECS:
        muxer = _Muxer(_CODECS[format], sample_rate, seekable=True)
        muxer.push(_finite(samples))
        return muxer.close()
    body = to_pcm16(samples)
    return wav_header(sample_rate, len(body)) + body if encoder.format == "wav" else body


class _Outlet:
    """Where the muxer of a stream writes to: it can be emptied and has no `seek`."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


class _Muxer:
    """One PyAV output container with one mono audio stream."""

    def __init__(self, codec: _Codec, sample_rate: int, *, seekable: bool) -> None:
        import av  # heavy, and a pcm or wav stream does without

        self._outlet: io.BytesIO | _Outlet = io.BytesIO() if seekable else _Outlet()
        # bitexact: no random Ogg serial and no library version, so equal samples make equal files.
        options = {"fflags": "+bitexact", "flush_packets": "1"} | ({} if seekable else dict(codec.options))
        self._container: Any = av.open(self._outlet, "w", format=codec.container, options=options)
        rate = sample_rate
        if codec.rates:
            rate = next((rate for rate in codec.rates if rate >= sample_rate), codec.rates[-1])
        self._stream: Any = self._container.add_stream(codec.codec, rate=rate)
        context: Any = self._stream.codec_context
        context.layout, context.format = "mono", codec.sample_format
        if codec.bit_rate is not None:
            context.bit_rate = codec.bit_rate if rate >= 16_000 else codec.bit_rate // 3
        self._format, self._rate, self._written = codec.sample_format, rate, 0
        self._resampler = _resampler(sample_rate, rate)

    def push(self, samples: NDArray[np.float32]) -> bytes:
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        self._write(samples)
        return self._take()

    def close(self) -> bytes:
        if self._resampler is not None:
            self._write(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        if self._written == 0 and self._format != "s16":
            # Without one frame an mp3 or aac file would be empty, which no player opens.
            self._write(np.zeros(self._rate // 50, np.float32))
        self._container.start_encoding()
        for packet in self._stream.encode(None):
            self._container.mux(packet)
        self._container.close()
        return self._outlet.getvalue() if isinstance(self._outlet, io.BytesIO) else self._outlet.take()

    def _write(self, samples: NDArray[np.float32]) -> None:
        import av

        if samples.size == 0:
            return
        block: NDArray[Any] = samples.clip(-1.0, 1.0)
        if self._format == "s16":
            block = (block * 32767.0).round().astype(np.int16)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(block[None]), format=self._format, layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._written
        self._written += samples.size
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def _take(self) -> bytes:
        return b"" if isinstance(self._outlet, io.BytesIO) else self._outlet.take()


def _resampler(source: int, target: int) -> Any:
    if source == target:
        return None
    import soxr

    return soxr.ResampleStream(source, target, 1, dtype="float32")

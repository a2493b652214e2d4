"""Audio files to samples: wav, flac, mp3, ogg (vorbis, opus), m4a, aac, webm, aiff, caf.

Blocks are decoded one after another, so that a file which grows past its limit ends before its memory is spent. What
comes from strangers is decoded in a process of its own: see `decoding`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import av
import numpy as np
import soxr
from numpy.typing import NDArray
from omni_runtime.errors import InvalidRequest

from omni_client.encoder import MAX_RATE, MIN_RATE
from omni_client.headers import is_cut_short, mp3_frame_bytes, states_length

MAX_SECONDS = 7_200.0
Samples = NDArray[np.float32]
Source = bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO

# Playlists, concat scripts and the like would make FFmpeg open other files and addresses: only plain containers.
_CONTAINERS = "wav,w64,flac,mp3,ogg,mov,mp4,m4a,3gp,3g2,matroska,webm,aac,aiff,caf"
_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "pipe"}
_DTYPES = {"u8": np.uint8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "flt": np.float32, "dbl": np.float64}
# Bytes of a sample: its value of silence and of full scale.
_INTEGERS = {1: (128.0, 128.0), 2: (0.0, 2.0**15), 4: (0.0, 2.0**31), 8: (0.0, 2.0**63)}
_MAX_CHANNELS = 8
# Containers whose header states how long the audio is.
_STATED = ("flac", "mov", "matroska", "caf")
_BLOCK = 65_536
_TOO_MUCH_MEMORY = "needs too much memory to decode"
# A stream that starts in the middle has a few undecodable packets; more than this share is a damaged file.
_DAMAGED_SHARE = 0.05
_SHORT_SECONDS = 0.1


class Decoder:
    """The samples of one file, block by block: `for block in decoder` gives float32 [n], mono, in [-1, 1].

    Channels are averaged. `sample_rate` Hz is the file's, or the one asked for (then blocks are resampled). Every fault
    of the file is an InvalidRequest which names `param`: no audio in it, cut short, damaged, a rate outside 4 to 384
    kHz, samples that are not finite, or longer than `max_seconds`.
    """

    def __init__(
        self, source: Source, *, max_seconds: float = MAX_SECONDS, sample_rate: int | None = None, param: str = "file"
    ) -> None:
        self._param, self._max_seconds = param, max_seconds
        self._file, self._owned = _open(source, param)
        try:
            self._size = self._file.seek(0, io.SEEK_END)
            self._file.seek(0)
            if self._size == 0:
                raise self._refuse("is empty")
            if is_cut_short(self._file, self._size):
                raise self._truncated()
            counted_mp3 = states_length(self._file)
            self._container = self._open_container()
            self._stream: Any = self._container.streams.audio[0] if self._container.streams.audio else None
            if self._stream is None:
                raise self._refuse("has no audio in it")
            if self._stream.codec_context is None:
                raise self._refuse("is in a codec that is not known")
            self.source_rate: int = self._stream.codec_context.sample_rate or 0
            self._check_rate(self.source_rate)
        except BaseException:
            self.close()
            raise
        kind = self._container.format.name.split(",")[0]
        self._length_known = kind in _STATED or (kind == "mp3" and counted_mp3)
        self.sample_rate: int = sample_rate or self.source_rate

    def __iter__(self) -> Iterator[Samples]:
        try:
            resample = self.sample_rate != self.source_rate
            stream = soxr.ResampleStream(self.source_rate, self.sample_rate, 1, dtype="float32") if resample else None
            # Closed from the inside out: PyAV must not demux from a container that is gone.
            with closing(self._blocks()) as blocks:
                for block in blocks:
                    yield block if stream is None else stream.resample_chunk(block)
            if stream is not None:
                yield stream.resample_chunk(np.zeros(0, np.float32), last=True)
        finally:
            self.close()

    def close(self) -> None:
        if (container := getattr(self, "_container", None)) is not None:
            container.close()
        if self._owned:
            self._file.close()

    def _open_container(self) -> Any:
        try:
            return av.open(self._file, "r", options=_OPTIONS, metadata_errors="ignore")
        except MemoryError as error:
            raise self._refuse(_TOO_MUCH_MEMORY) from error
        except (av.FFmpegError, ValueError, UnicodeError) as error:
            raise self._refuse("is not audio in a known format, or is cut short") from error

    def _blocks(self) -> Generator[Samples, None, None]:
        """Mono blocks at the file's own rate, of at most 64 Ki samples or one frame, checked."""
        pending: list[Samples] = []
        waiting = total = 0
        limit = int(self._max_seconds * self.source_rate)
        with closing(self._frames()) as frames:
            for frame in frames:
                if frame.sample_rate != self.source_rate:
                    raise self._refuse(f"changes its sample rate from {self.source_rate} to {frame.sample_rate} Hz")
                total += frame.samples
                if total > limit:
                    raise self._refuse(f"is longer than the limit of {self._max_seconds:g} seconds")
                pending.append(self._mono(frame))
                waiting += frame.samples
                if waiting >= _BLOCK:
                    yield self._join(pending)
                    pending, waiting = [], 0
        if total == 0:
            raise self._refuse("holds no audio that can be decoded")
        self._check_length(total)
        if pending:
            yield self._join(pending)

    def _frames(self) -> Generator[Any, None, None]:
        packets = damaged = 0
        last_failed = False
        mp3 = self._container.format.name == "mp3"
        try:
            with closing(self._container.demux(self._stream)) as demuxed:
                for packet in demuxed:
                    packets += 1
                    try:
                        frames = packet.decode()
                    except av.InvalidDataError:
                        damaged, last_failed = damaged + 1, True
                        continue
                    if packet.size:
                        # The decoder takes half an mp3 frame without a word; only the last one can be cut.
                        last_failed = mp3 and packet.size < (mp3_frame_bytes(bytes(packet)[:4]) or 0)
                    yield from frames
        except MemoryError as error:
            raise self._refuse(_TOO_MUCH_MEMORY) from error
        except av.FFmpegError as error:
            raise self._truncated() from error
        if last_failed:
            raise self._truncated()
        if damaged > 1 and damaged > packets * _DAMAGED_SHARE:
            raise self._refuse("is damaged: much of it cannot be decoded")

    def _mono(self, frame: Any) -> Samples:
        channels = frame.layout.nb_channels
        if channels > _MAX_CHANNELS:
            raise self._refuse(f"has {channels} channels; at most {_MAX_CHANNELS} are mixed down")
        dtype = _DTYPES[frame.format.name.removesuffix("p")]
        # Not `to_ndarray`: it reads planes that are not there when a damaged file changes its layout.
        if frame.format.is_planar:
            planes = frame.planes[:channels]
            raw = np.stack([np.frombuffer(plane, dtype, frame.samples) for plane in planes])
        else:
            raw = np.frombuffer(frame.planes[0], dtype, frame.samples * channels).reshape(-1, channels).T
        if raw.dtype.kind == "f":
            with np.errstate(over="ignore"):  # infinity is refused below
                samples = raw.astype(np.float32, copy=True)
        else:
            zero, scale = _INTEGERS[raw.dtype.itemsize]
            samples = ((raw.astype(np.float64) - zero) / scale).astype(np.float32)
        mono: Samples = samples[0] if channels == 1 else samples.mean(axis=0, dtype=np.float32)
        return mono

    def _join(self, pending: list[Samples]) -> Samples:
        block = np.concatenate(pending)
        if not np.isfinite(block).all():
            raise self._refuse("holds samples that are not finite numbers")
        return block.clip(-1.0, 1.0)

    def _check_rate(self, rate: int) -> None:
        if not MIN_RATE <= rate <= MAX_RATE:
            raise self._refuse(f"has a sample rate of {rate} Hz; it must be between {MIN_RATE} and {MAX_RATE}")

    def _check_length(self, total: int) -> None:
        """Compares with the length that the header states, where it is a fact and not an estimate of FFmpeg's."""
        if not self._length_known:
            return
        if (duration := self._stream.duration) is not None:
            stated = float(duration * self._stream.time_base)
        else:
            stated = (self._container.duration or 0) / av.time_base
        if total < (stated - _SHORT_SECONDS) * self.source_rate:
            raise self._truncated()

    def _refuse(self, fault: str) -> InvalidRequest:
        return InvalidRequest(f"the audio {fault}", param=self._param)

    def _truncated(self) -> InvalidRequest:
        return self._refuse("is cut short")


def decode(
    source: Source, *, max_seconds: float = MAX_SECONDS, sample_rate: int | None = None, param: str = "file"
) -> tuple[Samples, int]:
    """A whole file as (mono float32 [n] in [-1, 1], rate in Hz).

    What `Decoder` refuses is an InvalidRequest which names `param`.
    """
    decoder = Decoder(source, max_seconds=max_seconds, sample_rate=sample_rate, param=param)
    # A growing buffer instead of a list to join: the peak is one copy of the samples, not two.
    buffer = io.BytesIO()
    for block in decoder:
        buffer.write(block.tobytes())
    return np.frombuffer(buffer.getbuffer(), dtype=np.float32), decoder.sample_rate


def _open(source: Source, param: str) -> tuple[BinaryIO, bool]:
    if isinstance(source, str | os.PathLike):
        try:
            return Path(source).open("rb"), True
        except OSError as error:
            raise InvalidRequest(f"cannot read {os.fspath(source)}: {error.strerror}", param=param) from error
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source), True
    return source, False

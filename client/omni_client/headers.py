"""What a file's own header says about its length, where FFmpeg silently takes what is there."""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

# Recorders that cannot seek back write sizes such as 0xFFFFFFFF or 0x7FFFF000: they promise nothing.
_OPEN_ENDED = 0x7FFF0000
_HEAD = 4_096
_OGG_PAGE = 65_307
# Layer III, by the header's index (ISO 11172-3 and 13818-3).
_KILOBITS_MPEG1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_KILOBITS_MPEG2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
_MPEG1_RATES = {0: 44_100, 1: 48_000, 2: 32_000}


def is_cut_short(file: BinaryIO, size: int) -> bool:
    """Whether the wav, aiff or Ogg file of `size` bytes ends before its header says. Leaves `file` at its start."""
    file.seek(0)
    head = file.read(12)
    try:
        if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
            return _wav_is_cut_short(file, size)
        if head[:4] == b"FORM":
            return len(head) == 12 and int.from_bytes(head[4:8], "big") + 8 > size
        if head[:4] == b"OggS":
            return _ogg_is_cut_short(file, size)
        return False
    finally:
        file.seek(0)


def states_length(file: BinaryIO) -> bool:
    """Whether an mp3 file counts its frames (a Xing or Info frame); else its duration is only an estimate."""
    file.seek(0)
    head = file.read(10)
    skip = 0
    if head[:3] == b"ID3" and len(head) == 10:
        skip = 10 + (head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9])
    file.seek(skip)
    frame = file.read(_HEAD)
    file.seek(0)
    return b"Xing" in frame or b"Info" in frame


def mp3_frame_bytes(header: bytes) -> int | None:
    """The frame length that a 4-byte MPEG layer III header states; None for another header, or a free bit rate."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return None
    first = header[1] >> 3 & 3 == 3
    kilobits = (_KILOBITS_MPEG1 if first else _KILOBITS_MPEG2)[header[2] >> 4]
    rate = _MPEG1_RATES.get(header[2] >> 2 & 3, 0) >> {3: 0, 2: 1, 0: 2}.get(header[1] >> 3 & 3, 0)
    if not kilobits or not rate:
        return None
    return (144 if first else 72) * kilobits * 1000 // rate + (header[2] >> 1 & 1)


def _wav_is_cut_short(file: BinaryIO, size: int) -> bool:
    position = 12
    while position + 8 <= size:
        file.seek(position)
        name, length = struct.unpack("<4sI", file.read(8))
        if name == b"data":
            return bool(length < _OPEN_ENDED and position + 8 + length > size)
        position += 8 + length + length % 2
    return True


def _ogg_is_cut_short(file: BinaryIO, size: int) -> bool:
    """Whether the last page ends beyond the file. A missing end-of-stream flag is common, and fine."""
    file.seek(max(0, size - 2 * _OGG_PAGE), io.SEEK_SET)
    tail = file.read()
    start = tail.rfind(b"OggS")
    if start < 0 or start + 27 > len(tail):
        return True
    segments = tail[start + 26]
    table = tail[start + 27 : start + 27 + segments]
    return len(table) < segments or start + 27 + segments + sum(table) > len(tail)

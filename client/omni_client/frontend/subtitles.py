"""Segments of a transcription as SubRip (srt) and WebVTT files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def stamp(seconds: float, mark: str) -> str:
    """3661.5 -> "01:01:01,500" with mark ","."""
    milliseconds = round(max(0.0, seconds) * 1000)
    return (
        f"{milliseconds // 3_600_000:02}:{milliseconds // 60_000 % 60:02}:"
        f"{milliseconds // 1000 % 60:02}{mark}{milliseconds % 1000:03}"
    )


def _lines(segment: Mapping[str, Any]) -> str:
    # An empty line would end the cue, and an arrow would begin its times.
    text = "\n".join(line.strip() for line in segment["text"].splitlines() if line.strip())
    return text.replace("-->", "->")


def srt(segments: Iterable[Mapping[str, Any]]) -> str:
    cues = (
        f"{number}\n{stamp(segment['start'], ',')} --> {stamp(segment['end'], ',')}\n{_lines(segment)}\n"
        for number, segment in enumerate(segments, 1)
    )
    return "\n".join(cues)


def vtt(segments: Iterable[Mapping[str, Any]]) -> str:
    cues = (
        f"{stamp(segment['start'], '.')} --> {stamp(segment['end'], '.')}\n"
        f"{_lines(segment).replace('&', '&amp;').replace('<', '&lt;')}\n"
        for segment in segments
    )
    return "\n".join(["WEBVTT\n", *cues])

"""Segments as plain text, SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from omni_client.types import Segment


def text(segments: Iterable[Segment]) -> str:
    """One segment a line."""
    return "".join(f"{_line(segment.text)}\n" for segment in segments if segment.text.strip())


def srt(segments: Iterable[Segment]) -> str:
    """SubRip: numbered cues, times as 00:00:01,500."""
    cues = [
        f"{number}\n{timestamp(segment.start, ',')} --> {timestamp(segment.end, ',')}\n{_cue(segment.text)}\n"
        for number, segment in enumerate(_spoken(segments), 1)
    ]
    return "\n".join(cues)


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT: times as 00:00:01.500, with &, < and > escaped."""
    cues = [
        f"{timestamp(segment.start, '.')} --> {timestamp(segment.end, '.')}\n{_escape(_cue(segment.text))}\n"
        for segment in _spoken(segments)
    ]
    return "\n".join(["WEBVTT\n", *cues])


FORMATS: Mapping[str, Callable[[Iterable[Segment]], str]] = MappingProxyType({"text": text, "srt": srt, "vtt": vtt})


def timestamp(seconds: float, point: str) -> str:
    """HH:MM:SS and `point` and milliseconds; hours take as many digits as they need, never fewer than two."""
    milliseconds = max(0, round(seconds * 1000))
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"


def _spoken(segments: Iterable[Segment]) -> Iterable[Segment]:
    return (segment for segment in segments if segment.text.strip())


def _line(text: str) -> str:
    return " ".join(text.split())


def _cue(text: str) -> str:
    # An arrow would read as a cue's time line, an empty line as the end of the cue: the text stays on one line.
    return _line(text).replace("-->", "->")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

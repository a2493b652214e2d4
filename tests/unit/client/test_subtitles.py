"""SubRip and WebVTT as their readers expect them."""

from __future__ import annotations

import pytest
from omni_client import subtitles
from omni_client.types import Segment

SEGMENTS = [
    Segment(0, 0.0, 1.5, " Hello,\n\nthere. "),
    Segment(1, 1.5, 3_661.0004, "if a < b && c --> d"),
    Segment(2, 3_700.0, 3_701.0, "  "),
    Segment(3, 360_000.9996, 360_002.0, "long after"),
]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "00:00:00,000"),
        (1.5, "00:00:01,500"),
        (59.9996, "00:01:00,000"),
        (3_599.9999, "01:00:00,000"),
        (360_000, "100:00:00,000"),
        (-0.1, "00:00:00,000"),
    ],
)
def test_times(seconds: float, expected: str) -> None:
    assert subtitles.timestamp(seconds, ",") == expected


def test_srt() -> None:
    assert subtitles.srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello, there.\n"
        "\n2\n00:00:01,500 --> 01:01:01,000\nif a < b && c -> d\n"
        "\n3\n100:00:01,000 --> 100:00:02,000\nlong after\n"
    )
    assert subtitles.srt([]) == ""


def test_vtt() -> None:
    assert subtitles.vtt(SEGMENTS) == (
        "WEBVTT\n"
        "\n00:00:00.000 --> 00:00:01.500\nHello, there.\n"
        "\n00:00:01.500 --> 01:01:01.000\nif a &lt; b &amp;&amp; c -&gt; d\n"
        "\n100:00:01.000 --> 100:00:02.000\nlong after\n"
    )
    assert subtitles.vtt([]) == "WEBVTT\n"


def test_text() -> None:
    assert subtitles.text(SEGMENTS) == "Hello, there.\nif a < b && c --> d\nlong after\n"

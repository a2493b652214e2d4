from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
from omni_client.launch.demo import recording, word_error_rate


@pytest.mark.parametrize(
    ("said", "heard", "rate"),
    [
        ("Hello, world!", "hello world", 0.0),
        ("It costs twenty dollars.", "It costs $20.", 0.0),
        ("the cat sat down", "the cat sat", 0.25),
        ("the cat sat down", "", 1.0),
    ],
)
def test_words_are_compared_as_they_are_heard(said: str, heard: str, rate: float) -> None:
    assert word_error_rate(said, heard) == pytest.approx(rate)


def test_a_recording_grows_by_chunks_and_closes_whole(tmp_path: Path) -> None:
    with recording(tmp_path / "out" / "a.wav") as made:
        made.add(np.zeros(0, np.float32), 24_000)
        assert made.first is None, "an empty chunk is no audio"
        made.add(np.full(2400, 0.5, np.float32), 24_000)
        made.add(np.full(2400, 2.0, np.float32), 24_000)
    with wave.open(str(made.path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (24_000, 1, 4800)
        samples = np.frombuffer(file.readframes(4800), "<i2")
    assert samples[0] == int(0.5 * 32767) and samples[-1] == 32767, "beyond full scale it is clipped"
    assert made.seconds == pytest.approx(0.2)


def test_a_recording_of_nothing_makes_no_file(tmp_path: Path) -> None:
    with recording(tmp_path / "a.wav") as made:
        pass
    assert not made.path.exists()
    assert made.figures() == "no audio"

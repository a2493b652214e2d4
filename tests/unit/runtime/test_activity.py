import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from omni_runtime.activity import WindowFinder, WindowRules

FRAME = 0.032


def windows(probabilities, block=None, rules=None):
    finder = WindowFinder(FRAME, rules)
    if block is None:
        return [*finder.push(probabilities), *finder.close()]
    found = []
    for at in range(0, len(probabilities), block):
        found += finder.push(probabilities[at : at + block])
    return [*found, *finder.close()]


def seconds(value):
    return round(value / FRAME)


def test_silence_has_no_windows():
    assert windows([0.01] * 5_000) == []


def test_speech_is_padded_and_long_silence_left_out():
    track = [0.0] * seconds(10) + [0.9] * seconds(3) + [0.0] * seconds(60) + [0.9] * seconds(2)
    assert windows(track) == [
        (seconds(10) - seconds(0.4), seconds(10) + seconds(3) + seconds(0.4)),
        (len(track) - seconds(2) - seconds(0.4), len(track)),
    ]


def test_speech_that_lies_close_together_shares_a_window():
    track = [0.9] * seconds(3) + [0.0] * seconds(1) + [0.9] * seconds(3)
    assert windows(track) == [(0, len(track))]


def test_a_click_is_no_speech():
    assert windows([0.0] * 50 + [0.9] * 2 + [0.0] * 50) == []


def test_speech_without_a_pause_is_cut_where_it_is_least_certain():
    track = np.full(seconds(60), 0.9)
    track[seconds(24)] = 0.6
    found = windows(track.tolist())
    assert found[0] == (0, seconds(24))
    assert found[-1][1] == len(track)


PROBABILITIES = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 80)), max_size=40).map(
    lambda runs: [value for value, count in runs for _ in range(count)]
)
SHORT = WindowRules(silence=0.2, pad=0.1, gap=0.5, window=3.0, shortest=0.0)


@given(PROBABILITIES)
def test_windows_are_ordered_bounded_and_cover_all_speech(track):
    found = windows(track, rules=SHORT)
    covered = np.zeros(len(track) + 1, bool)
    before = 0
    for start, end in found:
        assert before <= start < end <= len(track)
        assert end - start <= SHORT.window / FRAME + 1
        covered[start:end] = True
        before = end
    assert all(covered[index] for index, value in enumerate(track) if value >= SHORT.threshold)


@given(PROBABILITIES, st.integers(1, 300))
def test_blocks_change_nothing(track, block):
    assert windows(track, block, SHORT) == windows(track, None, SHORT)

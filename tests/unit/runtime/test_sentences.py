import pytest
from hypothesis import given
from hypothesis import strategies as st
from omni_runtime.sentences import SentenceSplitter, split_sentences


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Smith met Mr. J. K. Jones at 5 p.m. on Monday.", ["Dr. Smith met Mr. J. K. Jones at 5 p.m. on Monday."]),
        ("It costs 3.50 dollars. Good.", ["It costs 3.50 dollars.", "Good."]),
        ('He said "Go!" Then he left.', ['He said "Go!"', "Then he left."]),
        ("Wait... what? Yes... No.", ["Wait... what?", "Yes...", "No."]),
        ("A title\n\nA paragraph", ["A title", "A paragraph"]),
        ("No end", ["No end"]),
        ("So did I. Then we left.", ["So did I.", "Then we left."]),
        ("  \n ", []),
        ("", []),
    ],
)
def test_where_a_sentence_ends(text, pieces):
    assert split_sentences(text) == pieces


def _squeezed(text):
    return "".join(text.split())


PROSE = st.text("abc ABC.,!?;:\n\"' Dr", max_size=300)


@given(PROSE, st.integers(5, 60))
def test_nothing_is_lost_and_nothing_is_too_long(text, limit):
    pieces = split_sentences(text, limit)
    assert _squeezed("".join(pieces)) == _squeezed(text)
    assert all(0 < len(piece) <= limit for piece in pieces)


@given(PROSE, st.data())
def test_text_that_comes_in_parts_gives_the_same_pieces(text, data):
    splitter, pieces, rest = SentenceSplitter(40), [], text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        pieces += splitter.push(rest[:cut])
        rest = rest[cut:]
    assert [*pieces, *splitter.close()] == split_sentences(text, 40)


def test_a_sentence_is_given_as_soon_as_the_next_begins():
    splitter = SentenceSplitter()
    assert splitter.push("Hello there.") == []
    assert splitter.push(" How") == ["Hello there."]

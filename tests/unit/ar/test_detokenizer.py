"""Text in pieces equals text at once, and nothing of a stop string gets out."""

from hypothesis import given, settings
from hypothesis import strategies as st
from omni_runtime.ar.detokenizer import Detokenizer, StopText

token_lists = st.lists(st.integers(0, 258), max_size=40)


@settings(max_examples=200, deadline=None)
@given(tokens=token_lists)
def test_joined_pieces_equal_the_whole_for_any_bytes(tokenizer, tokens):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_no_half_character_is_ever_delivered(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    so_far = ""
    for token in tokenizer.encode(text).ids:
        so_far += detokenizer.push(token)
        assert text.startswith(so_far)
    assert so_far + detokenizer.flush() == tokenizer.decode(tokenizer.encode(text).ids)


def test_special_tokens_are_text_only_when_asked(tokenizer):
    tokens = [*tokenizer.encode("a").ids, 2, *tokenizer.encode("b").ids]
    assert "".join(map(Detokenizer(tokenizer).push, tokens)) == "ab"
    assert "".join(map(Detokenizer(tokenizer, skip_special_tokens=False).push, tokens)) == "a<|end|>b"


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings(pieces, stops, include):
    watch = StopText(stops, include)
    delivered, seen, found = "", "", None
    for piece in pieces:
        seen += piece
        text, found = watch.push(piece)
        delivered += text
        assert seen.startswith(delivered)
        if found is not None:
            break
        assert not any(stop in delivered for stop in stops)
    if found is None:
        assert delivered + watch.flush() == "".join(pieces)
        assert not any(stop in "".join(pieces) for stop in stops)
    else:
        begin = min(at for stop in stops if (at := seen.find(stop)) >= 0)
        assert delivered == seen[: begin + len(found) if include else begin]


def test_what_cannot_become_a_stop_string_is_not_held_back():
    watch = StopText(["###"])
    assert watch.push("a#") == ("a", None)
    assert watch.push("#b") == ("##b", None)
    assert watch.push("c##") == ("c", None)
    assert watch.push("#d") == ("", "###")

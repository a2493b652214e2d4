import pytest
from hypothesis import given
from hypothesis import strategies as st
from omni_runtime.errors import TYPES, Internal, InvalidRequest, Overloaded, StageUnavailable, parse, render

TEXT = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=80)


@given(
    kind=st.sampled_from(sorted(TYPES)),
    message=TEXT,
    param=st.none() | TEXT,
    stage=st.none() | TEXT,
    retry_after=st.none() | st.floats(0, 1e6),
)
def test_a_rendered_error_is_read_back(kind, message, param, stage, retry_after):
    error = TYPES[kind](message, param=param, stage=stage, retry_after=retry_after, request="r1")
    line = render(error)
    assert "\n" not in line
    back = parse(line)
    assert type(back) is TYPES[kind]
    assert back.message == " ".join(message.split())
    assert (back.param, back.stage, back.retry_after, back.request) == (param, stage, retry_after, "r1")


def test_a_line_is_found_inside_what_a_server_puts_around_it():
    line = render(InvalidRequest("speed must be positive", param="speed"))
    back = parse(f"in ensemble 'x', {line}")
    assert isinstance(back, InvalidRequest)
    assert back.param == "speed"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Stub process 'hibari_tts_0_0' is not healthy.", "StageUnavailable"),
        ("Exceeds maximum queue size", "Overloaded"),
        ("Request for unknown model: 'nix' is not found", "NotFound"),
        ("Request timeout expired", "DeadlineExceeded"),
        ("unexpected inference input 'foo' for model 'hibari'", "InvalidRequest"),
        ("something else broke", "Internal"),
    ],
)
def test_tritons_own_messages_are_understood(text, kind):
    assert type(parse(text)).__name__ == kind


def test_the_input_that_triton_names_is_the_param():
    text = "[request id: <id_unknown>] unexpected shape for input 'stream' for model 'x'. Expected [1], got [2]."
    assert parse(text).param == "stream"


def test_a_transport_code_counts_where_the_text_says_nothing():
    assert isinstance(parse("", "UNAVAILABLE"), StageUnavailable)


def test_a_foreign_exception_is_internal_and_a_long_one_is_cut():
    back = parse(render(ValueError("x" * 10_000)))
    assert isinstance(back, Internal)
    assert len(back.message) < 2_100


def test_retry_after_survives():
    assert parse(render(Overloaded("full", retry_after=2.5))).retry_after == 2.5

"""Settings: what is accepted, what is refused, and by which name."""

import math

import pytest
from omni_runtime.ar.sampling import Sampling
from omni_runtime.errors import InvalidRequest


def test_defaults_are_those_of_vllm():
    assert Sampling.parse({}) == Sampling()
    assert (Sampling().max_tokens, Sampling().temperature, Sampling().top_p) == (16, 1.0, 1.0)


def test_null_means_default_and_no_limit_for_max_tokens():
    sampling = Sampling.parse({"temperature": None, "max_tokens": None, "stop": None})
    assert sampling == Sampling(max_tokens=None)


def test_whole_numbers_count_as_numbers_and_one_string_as_a_list():
    sampling = Sampling.parse({"temperature": 0, "stop": "end", "seed": 0})
    assert sampling.temperature == 0.0
    assert sampling.stop == ("end",)
    assert sampling.seed == 0
    assert sampling.greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("n", True),
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", "3"), ("max_tokens", True),
        ("min_tokens", -1), ("min_tokens", 17),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("temperature", True), ("temperature", 10**400),
        ("top_p", 0), ("top_p", 1.1), ("top_p", math.nan),
        ("top_k", -2), ("top_k", 1.0),
        ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0), ("repetition_penalty", -1),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("stop", 3), ("stop", [""]), ("stop", ["a", 1]), ("stop", ["a"] * 65), ("stop", "x" * 1001),
        ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", 2),
        ("ignore_eos", 1), ("skip_special_tokens", "yes"), ("include_stop_str_in_output", 0),
        ("seed", 2**63), ("seed", 1.0), ("seed", True),
        ("logprobs", 21), ("logprobs", -1), ("logprobs", True),
        ("best_of", 1), ("prompt_logprobs", 0),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        Sampling.parse({name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_what_is_no_object_is_refused():
    with pytest.raises(InvalidRequest, match="JSON object"):
        Sampling.parse([])

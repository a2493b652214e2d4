import json

import numpy as np
import pytest
from omni_runtime.chat import ChatParams
from omni_runtime.errors import InvalidRequest
from omni_runtime.module import request_of
from omni_runtime.request import Request
from omni_runtime.speech import SpeechParams


def asked(params=None, **parameters):
    request = request_of(
        {} if params is None else {"params": params if isinstance(params, str) else json.dumps(params)}
    )
    return Request(inputs=request.inputs, transport=request.transport, parameters=parameters)


def test_settings_come_from_the_tensor_and_from_request_parameters():
    params = SpeechParams.of(asked({"speed": 2}, seed=0, voice="heart"))
    assert (params.speed, params.seed, params.voice) == (2.0, 0, "heart")


def test_nothing_sent_is_the_default_and_null_is_nothing():
    assert SpeechParams.of(asked()) == SpeechParams.of(asked({"speed": None})) == SpeechParams()


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (asked("{"), "params"),
        (asked("[1]"), "params"),
        (asked({"sped": 1}), "sped"),
        (asked({"speed": 1}, speed=1), "speed"),
        (asked({"speed": "fast"}), "speed"),
        (asked({"speed": 0}), "speed"),
        (asked({"speed": True}), "speed"),
        (asked('{"speed": NaN}'), "speed"),
        (asked({"seed": 1.5}), "seed"),
        (asked({"seed": 2**63}), "seed"),
        (asked({"voice": 3}), "voice"),
        (asked(unknown=3), "unknown"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(request_, param):
    with pytest.raises(InvalidRequest) as refused:
        SpeechParams.of(request_)
    assert refused.value.param == param


def test_clients_that_only_send_strings_can_send_fractions_and_lists():
    params = ChatParams.of(asked(temperature="0.5", stop='["a", "b"]', max_tokens="3"))
    assert (params.temperature, params.stop, params.max_tokens) == (0.5, ["a", "b"], 3)
    assert ChatParams.of(asked(stop="END")).stop == ["END"]
    assert SpeechParams.of(asked(voice="1")).voice == "1"


def test_the_stage_gets_what_was_set_and_nothing_else():
    assert json.loads(ChatParams.of(asked({"top_p": 0.5})).sampling(7)) == {"top_p": 0.5, "seed": 7}


def test_an_array_is_no_string():
    request = request_of({"params": np.array([b"{}", b"{}"], object)})
    with pytest.raises(InvalidRequest, match="one string"):
        SpeechParams.of(request)

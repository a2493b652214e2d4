"""KServe v2 as others speak it: JSON on /generate, tritonclient's streams, perf_analyzer's file."""

import json
import queue
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

TEXT = "Hello there. It streams."
PERF_INPUT = Path(__file__).parents[2] / "docs" / "perf" / "hibari.json"


@pytest.fixture(scope="module")
def http(stack):
    with httpx.Client(base_url=stack.http_url, timeout=60) as client:
        yield client


def events(response):
    return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: ")]


def test_generate_answers_once(http):
    answer = http.post("/v2/models/hibari/generate", json={"text": TEXT, "speed": 1.5, "seed": 7}).json()
    assert answer["sample_rate"] == 24_000
    assert answer["seed"] == 7
    assert len(answer["audio"]) > 24_000


def test_generate_stream_is_the_same_in_chunks(http):
    body = {"text": TEXT, "seed": 7}
    whole = http.post("/v2/models/hibari/generate", json=body).json()
    with http.stream("POST", "/v2/models/hibari/generate_stream", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)
    assert len(chunks) == 2
    np.testing.assert_allclose(np.concatenate([chunk["audio"] for chunk in chunks]), whole["audio"], rtol=0, atol=1e-5)


def test_generate_chats_and_takes_sampling_as_parameters(http):
    body = {"text": "One, two, three,", "temperature": 0.0, "max_tokens": 8, "stop": '["nine"]'}
    answer = http.post("/v2/models/smollm2/generate", json=body).json()
    assert "four" in answer["text"]
    assert json.loads(answer["usage"])["completion_tokens"] <= 8
    with http.stream("POST", "/v2/models/smollm2/generate_stream", json={**body, "stream": True}) as response:
        assert "".join(chunk["text"] for chunk in events(response)) == answer["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": ""}, "text"),
        ({"text": TEXT, "speed": 0}, "speed"),
        ({"text": TEXT, "speed": "fast"}, "speed"),
        ({"text": TEXT, "nonsense": 1}, "nonsense"),
        ({"text": TEXT, "params": '{"seed": 1}', "seed": 2}, "seed"),
    ],
)
def test_a_bad_request_names_its_field_and_the_next_is_served(http, body, param):
    answer = http.post("/v2/models/hibari/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("InvalidRequest: ")
    assert f"param={param}" in answer.json()["error"]
    assert http.post("/v2/models/hibari/generate", json={"text": TEXT}).status_code == 200


def test_what_is_not_json_or_no_model_gets_tritons_own_error(http):
    broken = http.post("/v2/models/hibari/generate", content=b"{")
    assert broken.status_code >= 400
    assert "parse" in broken.json()["error"]
    assert http.post("/v2/models/nobody/generate", json={"text": TEXT}).status_code in (400, 404)
    assert http.post("/v2/models/hibari/generate", json={"text": TEXT}).status_code == 200


class Streaming:
    """tritonclient's callback stream, as its examples use it."""

    def __init__(self, url):
        self.client = triton.InferenceServerClient(url)
        self.events = queue.Queue()
        self.client.start_stream(lambda result, error: self.events.put((result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream()
        self.client.close()

    def ask(self, model, inputs, **options):
        tensors = []
        for name, value in inputs.items():
            kind = "BYTES" if value.dtype == object else {"bool": "BOOL", "float32": "FP32"}[str(value.dtype)]
            tensors.append(triton.InferInput(name, list(value.shape), kind))
            tensors[-1].set_data_from_numpy(value)
        self.client.async_stream_infer(model, tensors, enable_empty_final_response=True, **options)

    def answer(self):
        """The results of one request up to its final response, and the error that ended it, if one did."""
        results = []
        while True:
            result, error = self.events.get(timeout=60)
            if error is not None:
                return results, error
            response = result.get_response()
            if response.outputs:
                results.append(result)
            if response.parameters["triton_final_response"].bool_param:
                return results, None


def one(value):
    return np.array([value], dtype=object if isinstance(value, str) else None)


def test_tritonclient_streams_audio_with_its_offsets(stack):
    with Streaming(stack.grpc_url) as stream:
        stream.ask("hibari", {"text": one(TEXT), "stream": one(True)}, request_id="mine")
        results, error = stream.answer()
        assert error is None
        at = 0
        for result in results:
            assert result.get_response().id == "mine"
            assert result.as_numpy("offset").tolist() == [at]
            at += len(result.as_numpy("audio"))


def test_one_stream_carries_good_and_bad_requests_one_after_the_other(stack):
    with Streaming(stack.grpc_url) as stream:
        for text, bad in (("Fine.", False), (" ", True), ("Fine again.", False)):
            stream.ask("hibari", {"text": one(text), "stream": one(True)}, request_id="")
            results, error = stream.answer()
            assert bool(error) == bad
            assert bool(results) != bad
            if bad:
                assert isinstance(error, InferenceServerException)
                assert "InvalidRequest: text is empty" in str(error)


def test_perf_analyzers_input_file_is_a_request_that_is_served(stack):
    """The file that the README names, sent as perf_analyzer sends it: one entry of ``data`` a request."""
    with Streaming(stack.grpc_url) as stream:
        for entry in json.loads(PERF_INPUT.read_text())["data"]:
            stream.ask("hibari", {name: np.array(value, dtype=object) for name, value in entry.items()})
            results, error = stream.answer()
            assert error is None
            assert len(results) == 1
            assert len(results[0].as_numpy("audio"))


def test_metrics_have_tritons_families_and_our_own(stack, http):
    http.post("/v2/models/hibari/generate", json={"text": TEXT})
    text = httpx.get(stack.metrics_url).text
    assert 'nv_inference_request_success{model="hibari_tts"' in text
    assert 'omni_requests_admitted_total{stage="hibari"}' in text
    assert 'omni_first_output_total{kind="audio",stage="hibari"}' in text

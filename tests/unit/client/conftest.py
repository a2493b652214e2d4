"""A KServe server in a thread, with four small pipelines: what the SDK sends and cancels is seen from its other end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from omni_runtime import kserve
from omni_runtime.errors import InvalidRequest, render
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

RATE = 16_000


@pytest.fixture
def server() -> Iterator[SmallServer]:
    server = SmallServer()
    yield server
    server.stop()


CONFIGS: dict[str, dict[str, Any]] = {
    "talker": {"task": "text_to_speech", "stages": "talker_stage", "voices": "ann, bob"},
    "listener": {"task": "transcription", "stages": ""},
    "writer": {"task": "chat", "stages": ""},
    "companion": {"task": "chat", "stages": "", "audio": "yes"},
    "talker_stage": {},
}


class SmallServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`requests` has (model, inputs) of each call; `cancelled` is set when a caller leaves one.

    The text "forever" is spoken, and the message "forever" answered, without an end.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.cancelled = threading.Event()
        self.down: set[str] = set()
        self._server = grpc.server(ThreadPoolExecutor(8))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"localhost:{self._server.add_insecure_port('localhost:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(name="small", version="1.2.3")

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        models = [{"name": name, "state": "UNAVAILABLE" if name in self.down else "READY"} for name in CONFIGS]
        return ParseDict({"models": [*models, {"name": "absent"}]}, pb.RepositoryIndexResponse())

    def ModelConfig(self, request: Any, context: Any) -> Any:
        known = dict(CONFIGS[request.name])
        inputs = [{"name": "audio", "data_type": "TYPE_FP32", "dims": [-1]}] if known.pop("audio", None) else []
        parameters = {name: {"string_value": value} for name, value in known.items()}
        config = {"name": request.name, "input": inputs, "parameters": parameters}
        return ParseDict({"config": config}, pb.ModelConfigResponse())

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        context.add_callback(self.cancelled.set)
        request = next(requests)
        inputs = kserve.decode(_as_response(request))
        self.requests.append((request.model_name, inputs))
        try:
            for outputs in getattr(self, f"_{request.model_name}")(inputs):
                yield _message(outputs, last=False)
            # A stream that ended was not left.
            context.add_callback(self.cancelled.clear)
            yield _message({}, last=True)
        except InvalidRequest as error:
            yield pb.ModelStreamInferResponse(error_message=render(error))

    def _talker(self, inputs: kserve.Outputs) -> Iterator[dict[str, Any]]:
        text = kserve.text(inputs, "text")
        if not text.strip():
            raise InvalidRequest("text is empty", param="text")
        words = text.split()
        offset = 0
        while words:
            for word in words:
                audio = np.full(len(word) * 160, 0.25, np.float32)
                yield {
                    "audio": audio,
                    "sample_rate": np.array([RATE], np.int32),
                    "offset": np.array([offset], np.int64),
                    "text": word,
                    "seed": np.array([json.loads(kserve.text(inputs, "params")).get("seed", 7)], np.int64),
                    "usage": json.dumps({"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}),
                }
                offset += audio.size
            words = words if text == "forever" else []

    def _listener(self, inputs: kserve.Outputs) -> Iterator[dict[str, Any]]:
        seconds = inputs["audio"].size / inputs["audio_sample_rate"][0]
        for index, text in enumerate((" One.", " Two.")):
            segment = {"id": index, "start": index, "end": index + 1, "text": text, "tokens": [1, 2]}
            segment["words"] = [{"word": text, "start": index, "end": index + 1, "probability": 0.5}]
            yield {
                "text": text if index else text.strip(),
                "segments": json.dumps([segment]),
                "audio_duration": np.array([seconds], np.float32),
                "language": "en",
                "usage": json.dumps({"type": "duration", "seconds": seconds}) if index else "",
            }

    def _writer(self, inputs: kserve.Outputs) -> Iterator[dict[str, Any]]:
        said = json.loads(kserve.text(inputs, "messages"))[-1]["content"]
        while True:
            for index, word in enumerate(("You", " said", f" {said}.")):
                yield {
                    "text": word,
                    "token_ids": np.array([index], np.int64),
                    "logprobs": json.dumps([{str(index): {"logprob": -0.5, "rank": 1, "decoded_token": word}}]),
                    "finish_reason": "stop" if index == 2 else "",
                    "seed": np.array([3], np.int64),
                    "usage": json.dumps({"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}),
                }
            if said != "forever":
                return

    def _companion(self, inputs: kserve.Outputs) -> Iterator[dict[str, Any]]:
        wanted = json.loads(kserve.text(inputs, "params")).get("modalities", ["text", "audio"])
        yield {"text": "Hm.", "finish_reason": "", "input_text": "what was heard", "seed": np.array([3], np.int64)}
        if "audio" in wanted:
            for offset in (0, 800):
                yield {
                    "audio": np.full(800, 0.5, np.float32),
                    "sample_rate": np.array([RATE], np.int32),
                    "offset": np.array([offset], np.int64),
                }
        yield {"text": "", "finish_reason": "stop"}


def _as_response(request: Any) -> Any:
    response = pb.ModelInferResponse(raw_output_contents=request.raw_input_contents)
    for entry in request.inputs:
        response.outputs.add(name=entry.name, datatype=entry.datatype, shape=entry.shape)
    return response


def _message(outputs: dict[str, Any], *, last: bool) -> Any:
    response = _as_response(kserve.encode("", outputs))
    response.parameters["triton_final_response"].bool_param = last
    return pb.ModelStreamInferResponse(infer_response=response)

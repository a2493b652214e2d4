"""A small KServe server with scripted pipelines, and the real frontend in front of it, in one event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.json_format import ParseDict
from omni_client.frontend.server import serve
from omni_client.frontend.settings import Settings
from omni_runtime import errors
from omni_runtime.kserve import CHANNEL_OPTIONS
from openai import AsyncOpenAI
from tritonclient.grpc import model_config_pb2, service_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

RATE = 24_000
PIPELINES: dict[str, dict[str, Any]] = {
    "speaker": {
        "parameters": {"task": "text_to_speech", "voices": "heart, bella", "stages": "vocoder"},
        "input": ["text", "params", "stream"],
        "output": ["audio", "sample_rate", "offset", "seed", "text", "usage"],
    },
    "hearer": {
        "parameters": {"task": "transcription", "stages": "recogniser"},
        "input": ["audio", "audio_sample_rate", "params", "stream"],
        "output": ["text", "segments", "audio_duration", "language", "usage"],
    },
    "writer": {
        "parameters": {"task": "chat", "stages": "language_model"},
        "input": ["messages", "text", "params", "stream"],
        "output": ["text", "token_ids", "logprobs", "finish_reason", "usage", "seed"],
    },
    "talker": {
        "parameters": {"task": "chat", "voices": "heart", "stages": "writer, speaker"},
        "input": ["messages", "text", "audio", "audio_lengths", "audio_sample_rate", "params", "stream"],
        "output": ["text", "finish_reason", "usage", "seed", "audio", "sample_rate", "offset", "input_text"],
    },
}
STAGES = ("vocoder", "recogniser", "language_model")


@dataclass
class Call:
    """One request as Triton got it."""

    model: str
    request_id: str
    inputs: dict[str, Any]
    outputs: list[str]
    metadata: dict[str, str]
    parameters: dict[str, Any] = field(default_factory=dict)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    sent: int = 0
    read: int = 0

    @property
    def params(self) -> dict[str, Any]:
        return dict(json.loads(self.inputs["params"]))


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers by the words in the text it is given: see `_script`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.arrived = asyncio.Condition()
        self.unready: set[str] = set()
        self.replicas: dict[str, str] = {}
        # The process that a model says it is; one that has ended answers as a dead stub's model does.
        self.stubs: dict[str, subprocess.Popen[bytes]] = {}
        self.server = grpc.aio.server(options=CHANNEL_OPTIONS)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def restart(self) -> None:
        """The same again, on the same port, after it was stopped."""
        self.server = grpc.aio.server(options=CHANNEL_OPTIONS)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        assert self.server.add_insecure_port(self.address)
        await self.server.start()

    async def called(self, times: int) -> None:
        """Returns once so many calls have come."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.calls) >= times)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(name="triton", version="0.0.0-scripted")

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        response = pb.RepositoryIndexResponse()
        for name in (*PIPELINES, *STAGES, *self.replicas.values()):
            response.models.add(name=name, version="1", state="UNAVAILABLE" if name in self.unready else "READY")
        return response

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        if request.name in self.unready:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        copied = {copy: name for name, copy in self.replicas.items()}
        described = PIPELINES.get(copied.get(request.name, request.name), {})
        parameters = dict(described.get("parameters", {}))
        if request.name in self.replicas:
            parameters["replicas"] = self.replicas[request.name]
        if request.name in copied:
            parameters["replica_of"] = copied[request.name]
        config = {
            "name": request.name,
            "model_transaction_policy": {"decoupled": True},
            "parameters": {k: {"string_value": v} for k, v in parameters.items()},
            "input": [{"name": name} for name in described.get("input", [])],
            "output": [{"name": name} for name in described.get("output", [])],
        }
        return pb.ModelConfigResponse(config=ParseDict(config, model_config_pb2.ModelConfig()))

    async def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            metadata = {item[0]: item[1] for item in context.invocation_metadata()}
            inputs = {tensor.name: _read(tensor, raw) for tensor, raw in _pairs(request)}
            wanted = [tensor.name for tensor in request.outputs]
            parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
            call = Call(request.model_name, request.id, inputs, wanted, metadata, parameters)
            stub = self.stubs.get(call.model)
            if stub is not None and stub.poll() is not None:
                message = f"Failed to process the request(s) for model instance '{call.model}_0_0', message: Stub"
                yield pb.ModelStreamInferResponse(error_message=f"{message} process is not healthy.")
                continue
            if "control" in inputs:
                for other in self.calls:
                    if other.request_id == inputs.get("control_id") and inputs["control"] == "stop":
                        other.stop.set()
                    elif other.request_id == inputs.get("control_id"):
                        other.taken.put_nowait(parameters["omni_taken"])
                status = {"status": json.dumps({"pid": stub.pid if stub else 0, "running": 0})}
                yield _response(call, status, last=True)
                continue
            async with self.arrived:
                self.calls.append(call)
                self.arrived.notify_all()
            try:
                async for outputs in _until_stopped(call):
                    yield _response(call, outputs, last=False)
                if call.params.get("prompt") == "linger":
                    call.running.set()
                    await call.release.wait()
                yield _response(call, {}, last=True)
                call.ended.set()
            except errors.OmniError as error:
                if isinstance(error, errors.Cancelled):
                    call.cancelled.set()
                yield pb.ModelStreamInferResponse(error_message=errors.render(error))
            except (asyncio.CancelledError, GeneratorExit):
                call.cancelled.set()
                raise


async def _until_stopped(call: Call) -> AsyncIterator[dict[str, Any]]:
    script, stop = _script(call), asyncio.ensure_future(call.stop.wait())
    step: asyncio.Future[Any] = stop
    try:
        while True:
            step = asyncio.ensure_future(anext(script))
            await asyncio.wait({step, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                raise errors.Cancelled("the request was cancelled", stage=call.model)
            try:
                yield step.result()
            except StopAsyncIteration:
                return
    finally:
        for task in (step, stop):
            task.cancel()
        await asyncio.gather(step, stop, return_exceptions=True)


async def _script(call: Call) -> AsyncIterator[dict[str, Any]]:
    said = str(call.inputs.get("text", call.inputs.get("messages", "")))
    params, stream = call.params, call.inputs["stream"]
    if "overload" in said:
        raise errors.Overloaded("two requests wait already", retry_after=7, stage="vocoder")
    if "crash" in said:
        raise errors.Internal("a programming error")
    if "refuse" in said:
        raise errors.InvalidRequest("text is too odd", param="text")
    if "wait" in said and not stream:
        call.running.set()
        await call.release.wait()
    seed = params.get("seed", 0)
    if call.model.startswith("speaker"):
        sentences = [part for part in said.split(".") if part.strip()]
        level = 0.1 * params["speed"] + (0.01 if params.get("voice") == "bella" else 0.0) + (seed % 7) / 1000
        for k, sentence in enumerate(sentences):
            if k and "break" in said:
                raise errors.StageUnavailable("the vocoder died", stage="vocoder")
            while "flood" in said and call.sent >= call.parameters["omni_window"] + call.read:
                # As a stage does: the window is what may be on its way.
                if call.taken.empty() and call.sent > 200:
                    call.running.set()
                call.read = max(call.read, await call.taken.get())
            call.sent += 1
            if k and "wait" in said:
                call.running.set()
                await call.release.wait()
            account = {"input_tokens": len(said), "output_tokens": 9, "total_tokens": len(said) + 9}
            audio = np.full(2400, level, np.float32)
            yield {
                "audio": audio, "sample_rate": np.array([RATE], np.int32), "offset": np.array([2400 * k], np.int64),
                "seed": np.array([seed], np.int64), "text": sentence,
                "usage": json.dumps(account) if k == len(sentences) - 1 else "",
            }  # fmt: skip
    elif call.model == "hearer":
        seconds = call.inputs["audio"].size / int(call.inputs["audio_sample_rate"][0])
        words = [" and", " so", " on"]
        segments = []
        for k, text in enumerate(("Hello there. ", "General Kenobi.")):
            segment: dict[str, Any] = {
                "id": k, "start": k * 1.5, "end": k * 1.5 + 1.25, "text": text, "tokens": [1, 2], "temperature": 0.0,
                "avg_logprob": -0.25, "compression_ratio": 1.0, "no_speech_prob": 0.01,
            }  # fmt: skip
            if params.get("word_timestamps"):
                segment["words"] = [{"word": w, "start": 0.0, "end": 0.5, "probability": 0.9} for w in words]
            segments.append(segment)
        end = {
            "audio_duration": np.array([seconds], np.float32), "language": "en",
            "usage": json.dumps({"type": "duration", "seconds": seconds}),
        }  # fmt: skip
        if stream:
            for k, segment in enumerate(segments):
                yield {"text": segment["text"], "segments": json.dumps([segment]), **(end if k else {})}
        else:
            whole = "".join(segment["text"] for segment in segments)
            yield {"text": whole, "segments": json.dumps(segments), **end}
    else:
        deltas = ["Hello", " wor", "ld", f" {seed}"][: params.get("max_tokens", 4)]
        reason = "length" if len(deltas) < 4 else "stop"
        account = {"prompt_tokens": 5, "completion_tokens": len(deltas), "total_tokens": 5 + len(deltas)}
        groups = [[delta] for delta in deltas] if stream else [deltas]
        count = 0
        for k, group in enumerate(groups):
            last = k == len(groups) - 1
            if k and "wait" in said:
                call.running.set()
                await call.release.wait()
            if k and "break" in said:
                raise errors.StageUnavailable("the language model died", stage="language_model")
            outputs: dict[str, Any] = {
                "text": "".join(group), "finish_reason": reason if last else "", "seed": np.array([seed], np.int64),
                "token_ids": np.arange(count, count + len(group), dtype=np.int64),
                "usage": json.dumps(account) if last else "", "input_text": "what was heard",
                "audio": np.full(2400 * len(group), 0.25, np.float32), "sample_rate": np.array([RATE], np.int32),
                "offset": np.array([2400 * count], np.int64),
            }  # fmt: skip
            if "logprobs" in params:
                outputs["logprobs"] = json.dumps([_table(count + j, token) for j, token in enumerate(group)])
            if "audio" not in params.get("modalities", []):
                outputs = {name: value for name, value in outputs.items() if name not in ("audio", "sample_rate")}
            count += len(group)
            yield outputs


def _table(token_id: int, token: str) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": -0.5, "rank": 1, "decoded_token": token},
        "900": {"logprob": -1.5, "rank": 2, "decoded_token": "other"},
        "901": {"logprob": -2.5, "rank": 3, "decoded_token": "third"},
    }


def _value(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice"))


def _pairs(request: Any) -> Any:
    return zip(request.inputs, request.raw_input_contents, strict=True)


def _read(tensor: Any, raw: bytes) -> Any:
    if tensor.datatype == "BYTES":
        return deserialize_bytes_tensor(raw)[0].decode()
    values = np.frombuffer(raw, triton_to_np_dtype(tensor.datatype))
    return bool(values[0]) if tensor.datatype == "BOOL" else values


def _response(call: Call, outputs: dict[str, Any], last: bool) -> Any:
    response = pb.ModelInferResponse(model_name=call.model, id=call.request_id)
    for name, value in outputs.items():
        if name not in call.outputs:
            continue
        array = np.array([value.encode()], np.object_) if isinstance(value, str) else value
        entry = response.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        packed = serialize_byte_tensor(array).item() if entry.datatype == "BYTES" else array.tobytes()
        response.raw_output_contents.append(packed)
    response.parameters["triton_final_response"].bool_param = last
    return pb.ModelStreamInferResponse(infer_response=response)


class Records(logging.Handler):
    """The access log; a request's line may come after its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "request":
            self.queue.put_nowait(record.__dict__["omni"])


@dataclass
class Front:
    """The frontend under test, its clients, and the Triton behind it."""

    address: str
    triton: Triton
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    def last(self) -> Call:
        return self.triton.calls[-1]


@pytest_asyncio.fixture(loop_scope="module")
async def triton() -> AsyncIterator[Triton]:
    """The scripted server alone, for a frontend in a process of its own."""
    triton = Triton()
    await triton.server.start()
    yield triton
    await triton.server.stop(None)


@asynccontextmanager
async def running(
    *, stubs: dict[str, Any] | None = None, replicas: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Front]:
    triton = Triton()
    triton.stubs, triton.replicas = dict(stubs or {}), dict(replicas or {})
    await triton.server.start()
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    given = {
        "triton": triton.address,
        "port": 0,
        "grace": 1.0,
        "triton_metrics": "http://127.0.0.1:1/metrics",
        "warm": False,
    }
    server = asyncio.create_task(serve(Settings(**given | settings), told.set_result, stop=stop))
    try:
        await asyncio.wait({server, told}, return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            server.result()
        key = (settings.get("api_keys") or ("none",))[0]
        plain = httpx.AsyncClient(timeout=30, trust_env=False)
        async with (
            httpx.AsyncClient(base_url=told.result(), timeout=30, trust_env=False) as http,
            AsyncOpenAI(base_url=f"{told.result()}/v1", api_key=key, max_retries=0, http_client=plain) as openai,
        ):
            yield Front(told.result(), triton, http, openai)
    finally:
        stop.set()
        await asyncio.gather(server, return_exceptions=True)
        await triton.server.stop(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a module share a loop, and so a frontend."""
    for item in items:
        if pytest_asyncio.is_async_test(item) and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Front]:
    async with running(aliases={"tts-1": "speaker"}) as front:
        yield front


@pytest.fixture
def front(shared: Front) -> Front:
    """One frontend for a module's tests; its Triton has been asked nothing yet."""
    shared.triton.calls.clear()
    return shared


@pytest.fixture
def run() -> Callable[..., Any]:
    """Starts a frontend with settings of its own: `async with run(api_keys=("k",)) as front`."""
    return running


@pytest.fixture
def access_log() -> Iterator[asyncio.Queue[dict[str, Any]]]:
    """The fields of the access log's lines, as they come."""
    log, records = logging.getLogger("omni_client.frontend"), Records()
    log.addHandler(records)
    yield records.queue
    log.removeHandler(records)

"""KServe v2 over gRPC: tensors in and out, one stream per request, sync and async.

Used by scripts (through a pool), by the SDK and by the frontend, so that there is one place which knows how a tensor
lies on the wire, how a stream ends and how an error is read. The stubs are those that ``tritonclient`` generates.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from omni_runtime.errors import Cancelled, DeadlineExceeded, InvalidRequest, NotFound, OmniError, parse
from omni_runtime.wire import Array, Outputs, Parameter, Value, array, decode, encode, parameter, scalar, text

__all__ = [
    "Array",
    "Connection",
    "Outputs",
    "Parameter",
    "Value",
    "array",
    "decode",
    "encode",
    "failure",
    "parameter",
    "scalar",
    "target",
    "text",
]

# No limit of our own on a tensor's size; a keepalive below 10 s is answered with too_many_pings.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 50),
]
# How long the end of a stream may take after its last event, or after it was asked to stop.
DRAIN_SECONDS = 5.0
# Events that are taken off the wire before their consumer wants them.
READ_AHEAD = 4
# For the short questions: is it ready, what is its configuration.
ADMIN_SECONDS = 10.0
DEFAULT_TIMEOUT = 600.0


def target(url: str) -> str:
    """``host:port`` of ``grpc://host:port``, ``host:port`` or ``host`` (port 8001).

    Raises:
        InvalidRequest: another scheme.
    """
    scheme, _, rest = url.rpartition("://")
    if scheme not in ("", "grpc"):
        raise InvalidRequest(f"{url!r} is not a gRPC address; write grpc://HOST:PORT or HOST:PORT", param="url")
    rest = rest.rstrip("/")
    return rest if ":" in rest else f"{rest}:8001"


def failure(error: grpc.RpcError, timeout: float | None = None) -> OmniError:
    """The error of our tree that a gRPC error stands for."""
    code = error.code().name if error.code() is not None else "UNKNOWN"
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(f"no answer within {timeout:g} s" if timeout else "no answer within the deadline")
    return parse(error.details() or "", code)


def streams(inputs: Mapping[str, Value]) -> bool:
    wanted = inputs.get("stream", False)
    return bool(wanted if isinstance(wanted, bool) else array(wanted).any())


def is_last(response: pb.ModelInferResponse) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)


def with_final(parameters: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
    # With the empty final response a consumer knows the end by a message and need not guess it from the stream's.
    return {**(parameters or {}), "triton_enable_empty_final_response": True}


def metadata_of(headers: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in (headers or {}).items())


class Events:
    """The events of one stream, read by a task of its own.

    Cancelling a task that waits in gRPC cancels the call; one that waits here only stops waiting. A consumer that is
    slow holds up the reading, and so the sender.
    """

    def __init__(self, call: Any, timeout: float | None) -> None:
        self._call = call
        self._timeout = timeout
        self._queue: asyncio.Queue[Any] = asyncio.Queue(READ_AHEAD)
        self._abandoned = False
        self.closed = False
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def next(self) -> Any:
        """The next event.

        Raises:
            OmniError: the call failed, or ended without its final response.
        """
        event = await self._queue.get()
        if isinstance(event, OmniError):
            self.closed = True
            raise event
        return event

    def abandon(self) -> None:
        """Go on reading, for the end only."""
        self._abandoned = True
        while not self._queue.empty():
            self._queue.get_nowait()

    async def ended(self, seconds: float) -> None:
        """Wait for the end of the stream, and cancel it if it does not come."""
        await asyncio.wait({self._task}, timeout=seconds)
        if not self._task.done():
            self._call.cancel()
            await asyncio.wait({self._task}, timeout=seconds)

    async def _read(self) -> None:
        last: OmniError = parse("the stream ended without its final response: connection reset")
        try:
            async for event in self._call:
                if not self._abandoned:
                    await self._queue.put(event)
        except grpc.aio.AioRpcError as error:
            last = failure(error, self._timeout)
        except asyncio.CancelledError:
            last = Cancelled("the stream was cancelled")
        if not self._abandoned:
            await self._queue.put(last)


class Connection:
    """An asyncio connection to one Triton server; every call shares its channel.

    Args:
        url: ``grpc://host:port`` or ``host:port``.
        headers: metadata sent with every call (an access key, say).
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self.url = target(url)
        self._headers = dict(headers or {})
        self._channel = grpc.aio.insecure_channel(self.url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
        timeout: float | None = DEFAULT_TIMEOUT,
        headers: Mapping[str, str] | None = None,
        window: int = 0,
    ) -> AsyncGenerator[Outputs, None]:
        """The responses of a decoupled model, in order; an empty final one is not yielded.

        Closing the iterator early, or cancelling the task, cancels the request in the server. With a ``window`` the
        model pauses when so many chunks have not been taken from this iterator: a consumer that is slow then holds up
        the model instead of filling the server's memory. It needs a ``request_id`` of its own.

        Raises:
            OmniError: the error with which the stream ended.
            DeadlineExceeded: ``timeout`` seconds passed before the end.
        """
        request_id = request_id or uuid.uuid4().hex
        sent = {**with_final(parameters), **({"omni_window": window} if window else {})}
        request = encode(model, inputs, outputs=outputs, parameters=sent, request_id=request_id)

        async def requests() -> AsyncIterator[pb.ModelInferRequest]:
            yield request

        metadata = metadata_of({**self._headers, **(headers or {})})
        events = Events(self._stub.ModelStreamInfer(requests(), timeout=timeout, metadata=metadata), timeout)
        taken, ended = 0, False
        try:
            while not ended:
                event = await events.next()
                ended = bool(event.error_message) or is_last(event.infer_response)
                if event.error_message:
                    raise parse(event.error_message)
                if event.infer_response.outputs or not ended:
                    yield decode(event.infer_response)
                    taken += 1
                    if window and not ended and taken % max(1, window // 2) == 0:
                        self._spawn(self._tell(model, "ack", request_id, omni_taken=taken))
        finally:
            # A request that does not stream is over with its one response.
            over = ended or events.closed or (taken > 0 and not streams(inputs))
            self._spawn(self._leave(events, None if over else model, request_id))

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
        timeout: float | None = DEFAULT_TIMEOUT,
        headers: Mapping[str, str] | None = None,
    ) -> Outputs:
        """The response of a model that is not decoupled.

        Cancelling the task leaves the answer unread: such a call is one short step of its model, which would not be
        interrupted either, and every unary call that is cancelled costs gRPC's asyncio client 3 KiB for good.
        """
        request = encode(model, inputs, outputs=outputs, parameters=parameters, request_id=request_id)
        metadata = metadata_of({**self._headers, **(headers or {})})

        async def call() -> pb.ModelInferResponse:
            return await self._stub.ModelInfer(request, timeout=timeout, metadata=metadata)

        task = asyncio.get_running_loop().create_task(call())
        try:
            return decode(await asyncio.shield(task))
        except grpc.aio.AioRpcError as error:
            raise failure(error, timeout) from None
        except asyncio.CancelledError:
            self._tasks.add(task)
            task.add_done_callback(self._unread)
            raise

    async def live(self) -> bool:
        """Whether a server answers at all."""
        with suppress(OmniError):
            return bool((await self._ask("ServerLive", pb.ServerLiveRequest())).live)
        return False

    async def ready(self, model: str) -> bool:
        """Whether ``model`` is loaded; False also when no server answers."""
        with suppress(OmniError):
            return bool((await self._ask("ModelReady", pb.ModelReadyRequest(name=model))).ready)
        return False

    async def metadata(self) -> dict[str, Any]:
        """The server's name, version and extensions."""
        return as_dict(await self._ask("ServerMetadata", pb.ServerMetadataRequest()))

    async def config(self, model: str) -> dict[str, Any]:
        """The model's configuration in the field names of config.pbtxt; NotFound if it is not loaded."""
        return dict(as_dict(await self._ask("ModelConfig", pb.ModelConfigRequest(name=model)))["config"])

    async def index(self) -> list[dict[str, Any]]:
        """Every model of the repositories: name, and version, state and reason where it was loaded."""
        return list(as_dict(await self._ask("RepositoryIndex", pb.RepositoryIndexRequest())).get("models", []))

    async def statistics(self, model: str) -> dict[str, Any]:
        """Triton's counts for the loaded version of ``model``: inference_stats and others; counts are strings."""
        rows = as_dict(await self._ask("ModelStatistics", pb.ModelStatisticsRequest(name=model)))["model_stats"]
        return dict(rows[-1])

    async def load(self, model: str, timeout: float = 600.0, *, config: Mapping[str, Any] | None = None) -> None:
        """Load ``model``, with ``config`` instead of its file's if given; returns when it is ready."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = json.dumps(config)
        await self._ask("RepositoryModelLoad", request, timeout)

    async def unload(self, model: str, timeout: float = 60.0) -> None:
        """Unload ``model``; requests that run are finished first."""
        await self._ask("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model), timeout)

    async def close(self) -> None:
        """Close the channel, after what was left has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_SECONDS)
        await self._channel.close(grace=None)

    async def _leave(self, events: Events, model: str | None, request_id: str) -> None:
        """Read a stream to its end, asking ``model`` to stop first if it is not there yet.

        A cancel that meets the end of a stream leaves the request in the server for ever, so a stream is cancelled only
        when it does not end by itself.
        """
        events.abandon()
        stopped = model is None or await self._tell(model, "stop", request_id)
        await events.ended(DRAIN_SECONDS if stopped else 0.0)

    async def _tell(self, model: str, verb: str, request_id: str, **hints: Parameter) -> bool:
        """A control request; False if ``model`` does not understand it, as a stranger's may not."""
        inputs = {"control": verb, "control_id": request_id}
        try:
            async for _ in self.stream(model, inputs, outputs=["status"], parameters=hints, timeout=DRAIN_SECONDS):
                pass
        except OmniError as error:
            return isinstance(error, NotFound)
        return True

    def _unread(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, method: str, request: Any, timeout: float = ADMIN_SECONDS) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=timeout, metadata=metadata_of(self._headers))
        except grpc.aio.AioRpcError as error:
            raise failure(error, timeout) from None


def as_dict(message: Any) -> dict[str, Any]:
    return dict(MessageToDict(message, preserving_proto_field_name=True))

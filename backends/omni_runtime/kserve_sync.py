"""KServe v2 over gRPC for threads without an event loop: :class:`omni_runtime.kserve.Connection` without async."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from omni_runtime.errors import NotFound, OmniError, parse
from omni_runtime.kserve import (
    ADMIN_SECONDS,
    CHANNEL_OPTIONS,
    DEFAULT_TIMEOUT,
    DRAIN_SECONDS,
    as_dict,
    failure,
    is_last,
    metadata_of,
    streams,
    target,
    with_final,
)
from omni_runtime.wire import Outputs, Parameter, Value, decode, encode


class SyncConnection:
    """:class:`Connection` for threads without an event loop."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self.url = target(url)
        self._headers = dict(headers or {})
        self._channel = grpc.insecure_channel(self.url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
        timeout: float | None = DEFAULT_TIMEOUT,
        headers: Mapping[str, str] | None = None,
    ) -> Generator[Outputs, None, None]:
        """As :meth:`Connection.stream`; closing the generator cancels the request in the server."""
        request_id = request_id or uuid.uuid4().hex
        request = encode(model, inputs, outputs=outputs, parameters=with_final(parameters), request_id=request_id)
        call = self._stub.ModelStreamInfer(
            iter([request]), timeout=timeout, metadata=metadata_of({**self._headers, **(headers or {})})
        )
        taken, ended = 0, False
        try:
            for event in call:
                ended = bool(event.error_message) or is_last(event.infer_response)
                if event.error_message:
                    raise parse(event.error_message)
                if event.infer_response.outputs or not ended:
                    yield decode(event.infer_response)
                    taken += 1
                if ended:
                    return
            raise parse("the stream ended without its final response: connection reset")
        except grpc.RpcError as error:
            ended = True
            raise failure(error, timeout) from None
        finally:
            over = ended or (taken > 0 and not streams(inputs))
            self._leave(call, None if over else model, request_id)

    def _leave(self, call: Any, model: str | None, request_id: str) -> None:
        """As :meth:`Connection._leave`."""
        timer = threading.Timer(DRAIN_SECONDS, call.cancel)
        timer.daemon = True
        timer.start()
        try:
            if model is not None:
                control = {"control": "stop", "control_id": request_id}
                try:
                    for _ in self.stream(model, control, outputs=["status"], timeout=DRAIN_SECONDS):
                        pass
                except NotFound:
                    pass
                except (OmniError, ValueError):  # a model that knows no control, a channel that is closed
                    call.cancel()
            with suppress(grpc.RpcError):
                for _ in call:
                    pass
        finally:
            timer.cancel()

    def infer(
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
        """As :meth:`Connection.infer`."""
        request = encode(model, inputs, outputs=outputs, parameters=parameters, request_id=request_id)
        metadata = metadata_of({**self._headers, **(headers or {})})
        try:
            return decode(self._stub.ModelInfer(request, timeout=timeout, metadata=metadata))
        except grpc.RpcError as error:
            raise failure(error, timeout) from None

    def live(self) -> bool:
        """Whether a server answers at all."""
        with suppress(OmniError):
            return bool(self._ask("ServerLive", pb.ServerLiveRequest()).live)
        return False

    def ready(self, model: str) -> bool:
        """Whether ``model`` is loaded; False also when no server answers."""
        with suppress(OmniError):
            return bool(self._ask("ModelReady", pb.ModelReadyRequest(name=model)).ready)
        return False

    def metadata(self) -> dict[str, Any]:
        """The server's name, version and extensions."""
        return as_dict(self._ask("ServerMetadata", pb.ServerMetadataRequest()))

    def config(self, model: str) -> dict[str, Any]:
        """The model's configuration in the field names of config.pbtxt; NotFound if it is not loaded."""
        return dict(as_dict(self._ask("ModelConfig", pb.ModelConfigRequest(name=model)))["config"])

    def index(self) -> list[dict[str, Any]]:
        """Every model of the repositories: name, and version, state and reason where it was loaded."""
        return list(as_dict(self._ask("RepositoryIndex", pb.RepositoryIndexRequest())).get("models", []))

    def close(self) -> None:
        self._channel.close()

    def _ask(self, method: str, request: Any, timeout: float = ADMIN_SECONDS) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout, metadata=metadata_of(self._headers))
        except grpc.RpcError as error:
            raise failure(error, timeout) from None

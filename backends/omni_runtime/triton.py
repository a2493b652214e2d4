"""Between ``triton_python_backend_utils`` and our own types; the only module that touches Triton's objects.

``pb_utils`` exists only inside of a stub process and is handed in by the ``model.py`` that runs there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from omni_runtime.errors import OmniError, render
from omni_runtime.kserve import Array, Parameter
from omni_runtime.request import Request

log = logging.getLogger("omni.triton")


class ResponseSender:
    """:class:`omni_runtime.request.Transport` on Triton's response sender of a decoupled model."""

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb = pb_utils
        self._sender = request.get_response_sender()

    def send(self, outputs: Mapping[str, Array], *, last: bool) -> None:
        flags = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        self._sender.send(response(self._pb, outputs), flags=flags)

    def end(self, error: OmniError | None) -> None:
        final = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if error is None:
            self._sender.send(flags=final)
        else:
            self._sender.send(failure(self._pb, error), flags=final)

    def cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def response(pb_utils: Any, outputs: Mapping[str, Array]) -> Any:
    """An InferenceResponse of ``outputs``."""
    return pb_utils.InferenceResponse(output_tensors=[tensor(pb_utils, *item) for item in outputs.items()])


def failure(pb_utils: Any, error: OmniError) -> Any:
    """An InferenceResponse that carries ``error``, its line and Triton's code for it."""
    code = getattr(pb_utils.TritonError, error.code, pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(render(error), code))


def tensor(pb_utils: Any, name: str, value: Array) -> Any:
    return pb_utils.Tensor(name, np.ascontiguousarray(value))


def read_inputs(request: Any) -> dict[str, Array]:
    """Every input that was sent, copied: Triton takes its memory back when it likes."""
    return {each.name(): np.array(each.as_numpy(), copy=True) for each in request.inputs()}


def read_parameters(request: Any) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """The settings among the request parameters, and the hints of our own callers (``omni_…``); not Triton's own."""
    given = json.loads(request.parameters() or "{}")
    hints = {name: value for name, value in given.items() if name.startswith("omni_")}
    return {name: value for name, value in given.items() if not name.startswith(("triton_", "omni_"))}, hints


def read_headers(request: Any) -> dict[str, str]:
    """The trace context of a traced request (OpenTelemetry mode), as headers for the children."""
    try:
        context = request.trace().get_context()
        values = json.loads(context) if context else {}
    except Exception:  # a server without tracing, or in its own trace mode
        return {}
    return {name: str(value) for name, value in values.items() if name in ("traceparent", "tracestate")}


def decoupled_request(pb_utils: Any, request: Any) -> Request:
    """Our request of one of Triton's, for a decoupled model.

    Raises nothing: a request that cannot be read is ended with the reason by whoever looks at its inputs.
    """
    parameters, hints = read_parameters(request)
    return Request(
        inputs=read_inputs(request),
        transport=ResponseSender(pb_utils, request),
        label=request.request_id(),
        parameters=parameters,
        hints=hints,
        requested=frozenset(request.requested_output_names()),
        timeout=request.timeout() / 1e6 or None,
        headers=read_headers(request),
    )

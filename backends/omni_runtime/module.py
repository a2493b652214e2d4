"""One-shot networks: a request in, a response out, computed inside ``execute()`` one bounded batch at a time."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from omni_runtime import triton
from omni_runtime.config import StageConfig
from omni_runtime.errors import Cancelled, Internal, InvalidRequest, NotFound, OmniError
from omni_runtime.kserve import Array, Value, array
from omni_runtime.metrics import TritonMetrics
from omni_runtime.request import Request

log = logging.getLogger("omni.module")


class Module(Protocol):
    """A network with its pre- and post-processing; loaded by ``load(config)`` of a module in omni_runtime.modules."""

    engine: str
    device: str

    def __call__(self, request: Request) -> Mapping[str, Value]:
        """The outputs for one request."""

    def warm_up(self) -> None:
        """Run every shape that the first requests could meet cold."""


def load(config: StageConfig) -> Module:
    """The network that config.pbtxt names in ``parameters { key: "network" }``."""
    name = config.parameters["network"]
    loader: Callable[[StageConfig], Module] = importlib.import_module(f"omni_runtime.modules.{name}").load
    return loader(config)


class NoTransport:
    """A module's request is answered by what ``execute()`` returns."""

    def send(self, outputs: Mapping[str, Array], *, last: bool) -> None:
        raise Internal("a module returns its outputs")

    def end(self, error: OmniError | None) -> None:
        raise Internal("a module raises its error")

    def cancelled(self) -> bool:
        return False


class ModuleServer:
    """``execute()`` of a module stage: reads a request, runs the network, and turns what it raises into an answer."""

    def __init__(self, pb_utils: Any, config: StageConfig) -> None:
        self._pb = pb_utils
        self._name = config.name
        self._module = load(config)
        self._module.warm_up()
        self._metrics = TritonMetrics(pb_utils, config.name)
        self._metrics.engine(self._module.engine, self._module.device)
        self._metrics.flush()
        log.info("%s: engine %s on %s", config.name, self._module.engine, self._module.device)

    def execute(self, requests: list[Any]) -> list[Any]:
        try:
            return [self._answer(request) for request in requests]
        finally:
            self._metrics.flush()

    def _answer(self, raw: Any) -> Any:
        root = raw.request_id()
        try:
            if raw.is_cancelled():
                self._metrics.cancelled()
                raise Cancelled("the request was cancelled", stage=self._name)
            parameters, hints = triton.read_parameters(raw)
            root = str(hints.get("omni_request") or root)
            request = Request(
                inputs=triton.read_inputs(raw),
                transport=NoTransport(),
                label=raw.request_id(),
                parameters=parameters,
                hints=hints,
                requested=frozenset(raw.requested_output_names()),
            )
            outputs = self._control(request) if request.has("control") else self._module(request)
            kept = {name: array(value) for name, value in outputs.items() if request.wants(name)}
            return triton.response(self._pb, kept)
        except OmniError as error:
            failed = error
        except Exception as error:
            log.exception("%s: request %s failed", self._name, root)
            failed = Internal(f"{type(error).__name__}: {error}")
        failed.stage = failed.stage or self._name
        failed.request = failed.request or root
        self._metrics.failed(type(failed).__name__)
        return triton.failure(self._pb, failed)

    def _control(self, request: Request) -> dict[str, Value]:
        verb = request.text("control")
        if verb not in ("stop", "status"):
            raise InvalidRequest(f"control must be stop or status, not {verb!r}", param="control")
        if request.text("control_id", "") or verb == "stop":
            # A request is computed within execute(), so while this one is answered no other runs here.
            raise NotFound("a module runs no request that could be asked for", param="control_id")
        return {"status": json.dumps({"pid": os.getpid(), "running": 0, "waiting": 0})}


def request_of(inputs: Mapping[str, Value]) -> Request:
    """A request outside of Triton, for a warm-up."""
    return Request(inputs={name: array(value) for name, value in inputs.items()}, transport=NoTransport())

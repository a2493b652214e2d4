"""One request of a loop stage: its inputs, its way out, and exactly one FINAL."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from omni_runtime.errors import InvalidRequest, OmniError
from omni_runtime.kserve import Array, Parameter, Value, array


class Transport(Protocol):
    """The way out of a request. Triton's response sender in a server; tests bring their own."""

    def send(self, outputs: Mapping[str, Array], *, last: bool) -> None: ...

    def end(self, error: OmniError | None) -> None: ...

    def cancelled(self) -> bool: ...


@dataclass(eq=False)
class Request:
    """What a handler works on. ``id`` is our own; the client's ``label`` may be empty or repeated.

    ``inputs`` are the tensors sent, ``parameters`` the request parameters, ``requested`` the outputs asked for (None:
    all), ``timeout`` the seconds after which the caller no longer wants it, ``headers`` what travels on to every child
    (traceparent), ``hints`` what our own callers add (priority, window, the id of the request at the root).
    """

    inputs: Mapping[str, Array]
    transport: Transport
    label: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    requested: frozenset[str] | None = None
    timeout: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, Parameter] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    progress: dict[str, Any] = field(default_factory=dict)
    taken: int = 0
    started: float = field(default_factory=time.monotonic)
    ended: bool = False

    def has(self, name: str) -> bool:
        return name in self.inputs

    def text(self, name: str, default: str | None = None) -> str:
        """The one string of BYTES[1] input ``name``.

        Raises:
            InvalidRequest: missing without a default, not one string, or not UTF-8.
        """
        if name not in self.inputs:
            if default is None:
                raise InvalidRequest(f"{name} is required", param=name)
            return default
        tensor = self.inputs[name]
        if tensor.size != 1:
            raise InvalidRequest(f"{name} must be one string, not {tensor.size}", param=name)
        value = tensor.reshape(-1)[0]
        try:
            return value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            raise InvalidRequest(f"{name} is not UTF-8", param=name) from None

    def scalar(self, name: str, default: Any = None) -> Any:
        """The one value of a one-element input, as a Python value; ``default`` where it was not sent."""
        if name not in self.inputs:
            return default
        tensor = self.inputs[name]
        if tensor.size != 1:
            raise InvalidRequest(f"{name} must have one element, not {tensor.size}", param=name)
        return tensor.reshape(-1)[0].item()

    @property
    def root(self) -> str:
        """The id by which logs and errors know the request that all of this is done for."""
        return str(self.hints.get("omni_request") or self.label or self.id)

    @property
    def priority(self) -> str:
        """``high`` or ``normal``: of the parent's call, or ``priority`` in ``params``."""
        if "omni_priority" in self.hints:
            return "high" if self.hints["omni_priority"] == "high" else "normal"
        try:
            params = json.loads(self.text("params", "{}") or "{}")
        except (InvalidRequest, ValueError):
            return "normal"
        return "high" if isinstance(params, dict) and params.get("priority") == "high" else "normal"

    @property
    def window(self) -> int:
        """Chunks that the caller lets wait before it has taken one; 0 for a caller who does not say."""
        window = self.hints.get("omni_window", 0)
        return window if isinstance(window, int) else 0

    @property
    def stream(self) -> bool:
        """Whether chunks are wanted; otherwise exactly one data response is sent."""
        return bool(self.scalar("stream", False))

    def wants(self, name: str) -> bool:
        return self.requested is None or name in self.requested

    def remaining(self, default: float) -> float:
        """Seconds left of the request's own timeout, and no more than ``default``."""
        if self.timeout is None:
            return default
        return max(0.0, min(default, self.started + self.timeout - time.monotonic()))

    def send(self, outputs: Mapping[str, Value], *, last: bool = False) -> None:
        """Send what was requested of ``outputs``; ``last`` makes it the FINAL. Nothing is sent after that."""
        if self.ended:
            return
        self.ended = last
        self.transport.send({name: array(value) for name, value in outputs.items() if self.wants(name)}, last=last)

    def end(self, error: OmniError | None = None) -> None:
        """Send the FINAL, with ``error`` if there is one; does nothing the second time."""
        if self.ended:
            return
        self.ended = True
        self.transport.end(error)

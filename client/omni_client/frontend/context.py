"""What is known of one request beside its body: its id, its trace, and what the log will say."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, TextIO

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from omni_client.frontend.errors import ApiError, from_exception

_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_KEY = "omni.context"
_TELLING_SECONDS = 1.0

logger = logging.getLogger("omni_client.frontend")


@dataclass(slots=True)
class Context:
    """What a pool calls its parent, too."""

    request_id: str
    trace: dict[str, str]
    """Headers that continue the caller's trace: traceparent, tracestate."""
    fields: dict[str, Any] = field(default_factory=dict)
    """For the log: model, task, user, metadata, error …"""
    started: float = field(default_factory=time.perf_counter)
    priority: str = "normal"
    timeout: float | None = None
    """Seconds that the caller gives the call."""
    until: float | None = None
    """When they are over, by the monotonic clock."""

    @classmethod
    def enter(cls, scope: Scope) -> Context:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        parent = headers.get("traceparent", "")
        trace = {}
        if _TRACEPARENT.fullmatch(parent):
            trace["traceparent"] = parent
            if (state := headers.get("tracestate", "")) and state.isascii() and state.isprintable():
                trace["tracestate"] = state
        context = cls(given if _SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}", trace)
        scope[_KEY] = context
        return context

    @classmethod
    def of(cls, request: Request) -> Context:
        context: Context = request.scope[_KEY]
        return context

    @property
    def headers(self) -> dict[str, str]:
        return self.trace

    @property
    def root(self) -> str:
        return self.request_id

    def limit(self, timeout: float | None) -> None:
        """The caller wants no answer after `timeout` seconds from now."""
        if timeout is not None:
            self.timeout, self.until = timeout, time.monotonic() + timeout

    def left(self, default: float) -> float:
        """Seconds until the caller's deadline, and no more than `default`."""
        return default if self.until is None else min(default, self.until - time.monotonic())

    @property
    def late(self) -> bool:
        """Whether the caller's deadline has come; clocks of two processes do not agree to the millisecond."""
        return self.until is not None and time.monotonic() > self.until - 0.1

    def remaining(self, default: float) -> float:
        """What a call may take: the pipeline, which knows the deadline, is left the time to tell what it waited for."""
        return default if self.until is None else min(default, max(0.0, self.left(default)) + _TELLING_SECONDS)

    def fail(self, error: Exception) -> ApiError:
        """The answer for `error`, which is noted for the log; what only we can explain is logged with its traceback."""
        failure = from_exception(error, self.request_id)
        self.fields["error"] = failure.message if failure.code != "internal_error" else repr(error)
        self.fields["code"] = failure.code
        if stage := getattr(error, "stage", None):
            self.fields["stage"] = stage
        if failure.status == 500:
            logger.error("a request failed", exc_info=error, extra={"omni": {"request_id": self.request_id}})
        return failure

    def log(self, level: int, message: str, **fields: Any) -> None:
        record = {"request_id": self.request_id, **fields, **self.fields}
        logger.log(level, message, extra={"omni": record})


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "omni", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value!r}" for name, value in getattr(record, "omni", {}).items())
        return f"{super().format(record)} {fields}".rstrip()


_LEVELS = (("omni_client.frontend", logging.INFO), ("uvicorn", logging.WARNING), ("omni.pool", logging.WARNING))


class _Output(logging.StreamHandler[TextIO]):
    """Ours, so that a second frontend in the process replaces it and leaves other handlers alone."""


def configure_logs(log_format: str) -> None:
    """Sends the frontend's records, and what uvicorn and the pools warn of, to stderr in the chosen form."""
    handler = _Output(sys.stderr)
    text = TextFormatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    for name, level in _LEVELS:
        log = logging.getLogger(name)
        log.handlers = [other for other in log.handlers if not isinstance(other, _Output)] + [handler]
        log.propagate = False
        log.setLevel(level)

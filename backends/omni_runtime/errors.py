"""One error tree for stages, pipelines, SDK and frontend; rendered to a line and read back here.

    OmniError
    ├── InvalidRequest     400  the caller's fault: a bad or unknown field, undecodable media, too long
    ├── NotFound           404  model, voice, job or id
    ├── Overloaded         429  admission refused; ``retry_after`` seconds
    ├── StageUnavailable   503  no live replica
    ├── DeadlineExceeded   504  a wait ran out
    ├── Cancelled          499  the caller left
    └── Internal           500  everything else

A status code does not survive a gRPC stream, so the type travels in the message:
``<type>: <text> [param=… stage=… retry_after=… request=…]``. Only the standard library is imported.
"""

from __future__ import annotations

import re
from typing import ClassVar
from urllib.parse import quote, unquote


class OmniError(Exception):
    """Base of every error that crosses a process border.

    Args:
        message: what went wrong, for the caller, on one line.
        param: the request's field at fault.
        stage: the stage (Triton model) where it happened.
        retry_after: seconds after which trying again makes sense.
        request: id of the request, for the logs.
    """

    code: ClassVar[str] = "INTERNAL"
    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        stage: str | None = None,
        retry_after: float | None = None,
        request: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.stage = stage
        self.retry_after = retry_after
        self.request = request

    def __str__(self) -> str:
        return self.message


class InvalidRequest(OmniError):
    code, status = "INVALID_ARG", 400


class NotFound(OmniError):
    code, status = "NOT_FOUND", 404


class Overloaded(OmniError):
    code, status = "UNAVAILABLE", 429


class StageUnavailable(OmniError):
    code, status = "UNAVAILABLE", 503


class DeadlineExceeded(OmniError):
    code, status = "UNAVAILABLE", 504


class Cancelled(OmniError):
    code, status = "CANCELLED", 499


class Internal(OmniError):
    code, status = "INTERNAL", 500


TYPES: dict[str, type[OmniError]] = {
    kind.__name__: kind
    for kind in (InvalidRequest, NotFound, Overloaded, StageUnavailable, DeadlineExceeded, Cancelled, Internal)
}

_LINE = re.compile(
    rf"({'|'.join(TYPES)}): (.*?)(?: \[((?:(?:param|stage|retry_after|request)=\S*? ?)+)\])?$", re.DOTALL
)
_MESSAGE_LIMIT = 2000

# Triton's own messages that stand for one of our types: what its scheduler, its clients and its stubs say.
_TRITON: tuple[tuple[re.Pattern[str], type[OmniError]], ...] = (
    (re.compile(r"exceeds maximum queue size", re.I), Overloaded),
    (re.compile(r"request timeout expired|deadline exceeded", re.I), DeadlineExceeded),
    (re.compile(r"unknown model|is not found|failed to find model|no such model", re.I), NotFound),
    (
        re.compile(
            r"stub process|is not healthy|is not ready|has no available versions|server is (?:stopping|exiting)"
            r"|failed to connect|connection refused|socket closed|no live replica|connection reset|goaway",
            re.I,
        ),
        StageUnavailable,
    ),
    (re.compile(r"cancell?ed", re.I), Cancelled),
    (
        re.compile(
            r"unexpected (?:inference input|shape|datatype|data-type)|expected \d+ inputs|invalid argument"
            r"|unexpected inference output|\[request id:.*(?:input|shape)|unable to parse|failed to parse"
            r"|must specify|expects? .*dimension|bytes? .*expected|input .* is not",
            re.I,
        ),
        InvalidRequest,
    ),
)
_INPUT = re.compile(r"input '([^']+)'")
# gRPC status names, for errors that the transport itself raised.
_GRPC: dict[str, type[OmniError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": NotFound,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNAVAILABLE": StageUnavailable,
    "RESOURCE_EXHAUSTED": InvalidRequest,
}


def render(error: BaseException) -> str:
    """One line that :func:`parse` reads back; a foreign exception is rendered as Internal."""
    if not isinstance(error, OmniError):
        error = Internal(f"{type(error).__name__}: {error}")
    text = " ".join(error.message.split())
    if len(text) > _MESSAGE_LIMIT:
        text = text[: _MESSAGE_LIMIT - 1] + "…"
    notes = [
        f"{name}={quote(str(value), safe='/.,:[]()_-')}"
        for name in ("param", "stage", "retry_after", "request")
        if (value := getattr(error, name)) not in (None, "")
    ]
    return f"{type(error).__name__}: {text}" + (f" [{' '.join(notes)}]" if notes else "")


def parse(text: str, grpc_code: str | None = None) -> OmniError:
    """The error that ``text`` stands for: our own line, wherever it begins, or one of Triton's messages.

    ``grpc_code`` is the transport's status name (``UNAVAILABLE`` …), used when the text says nothing.
    """
    text = text.strip()
    if found := _LINE.search(text):
        kind, message, notes = found.groups()
        values = dict(note.split("=", 1) for note in (notes or "").split())
        retry_after = values.get("retry_after")
        return TYPES[kind](
            message,
            param=_unquote(values.get("param")),
            stage=_unquote(values.get("stage")),
            retry_after=float(retry_after) if retry_after else None,
            request=_unquote(values.get("request")),
        )
    for pattern, kind_of in _TRITON:
        if pattern.search(text):
            named = _INPUT.search(text) if kind_of is InvalidRequest else None
            return kind_of(text, param=named[1] if named else None)
    return _GRPC.get(grpc_code or "", Internal)(text or grpc_code or "unknown error")


def _unquote(value: str | None) -> str | None:
    return None if value is None else unquote(value)

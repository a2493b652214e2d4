"""The one error body of every route, `{"error": {"message", "type", "param", "code"}}`, and what becomes one.

ApiError            an answer other than 200, decided at this edge or made from
  omni_runtime.errors.OmniError        what the server said
  fastapi.RequestValidationError       a body that does not fit its schema (400)
  starlette.HTTPException              no such route (404), wrong method (405)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from omni_runtime import errors
from starlette.responses import JSONResponse

CODES: dict[type[errors.OmniError], str] = {
    errors.InvalidRequest: "invalid_value",
    errors.NotFound: "not_found",
    errors.Overloaded: "overloaded",
    errors.StageUnavailable: "stage_unavailable",
    errors.DeadlineExceeded: "deadline_exceeded",
    errors.Cancelled: "cancelled",
    errors.Internal: "internal_error",
}
# Names that a tagged union puts into the path of an error; they are not fields.
TAGS = frozenset({"plain", "many"})


class ApiError(Exception):
    """Becomes the error body. `param` is the field, as a path: `messages[0].content`."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: float | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if status == 429:
            self.headers["retry-after"] = str(max(1, round(retry_after or 1)))

    @property
    def type(self) -> str:
        if self.status in (401, 403):
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)

    def event(self) -> bytes:
        """The last event of a stream that failed."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


def refused(message: str, param: str, code: str = "unsupported_parameter") -> ApiError:
    """A field that is understood and cannot be honoured."""
    return ApiError(400, message, param=param, code=code)


def from_omni(error: errors.OmniError, request_id: str) -> ApiError:
    kind = next((kind for kind in type(error).__mro__ if kind in CODES), errors.Internal)
    message = str(error)
    # Which stage it was is what one would ask next.
    if error.stage and kind in (errors.StageUnavailable, errors.DeadlineExceeded) and error.stage not in message:
        message = f"{error.stage}: {message}"
    if kind is errors.Internal:
        message = f"{message} (request {request_id})"
    return ApiError(
        kind.status, message, param=getattr(error, "param", None), code=CODES[kind],
        retry_after=getattr(error, "retry_after", None),
    )  # fmt: skip


def from_exception(error: BaseException, request_id: str) -> ApiError:
    """Anything that went wrong; what is no known error is Internal and tells the client its id, not its text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, errors.OmniError):
        return from_omni(error, request_id)
    if isinstance(error, TimeoutError):
        return ApiError(504, "a wait of the frontend ran out", code="deadline_exceeded")
    return ApiError(500, f"the frontend failed on this request (request {request_id})", code="internal_error")


def from_status(status: int, method: str, path: str) -> ApiError:
    if status == 404:
        return ApiError(404, f"there is no route {method} {path}", code="unknown_url")
    if status == 405:
        return ApiError(405, f"{path} does not take {method}", code="method_not_allowed")
    phrase = HTTPStatus(status).phrase
    return ApiError(status, phrase, code=phrase.lower().replace(" ", "_"))


def path_of(location: Sequence[str | int]) -> str | None:
    """("body", "messages", 0, "content", "many", 1) -> "messages[0].content[1]"."""
    path = ""
    for item in location[1:]:
        if isinstance(item, int):
            path += f"[{item}]"
        elif item not in TAGS:
            path += f".{item.removesuffix('[]')}" if path else item.removesuffix("[]")
    return path or None


def from_validation(found: Sequence[Any]) -> ApiError:
    """`found` is pydantic's list of errors; the first one is told."""
    error = found[0]
    kind, location = error["type"], error["loc"]
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "it cannot be read")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    named = (path_of(location), error.get("ctx", {}).get("param"))
    param = ".".join(name for name in named if name)
    if not param:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_body")
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is required", param=param, code="missing_required_parameter")
    message = error["msg"].removeprefix("Value error, ")
    message = f"{named[0]}: {message}" if named[0] else message
    code = "unsupported_parameter" if kind == "unsupported_parameter" else "invalid_value"
    return ApiError(400, message, param=param, code=code)

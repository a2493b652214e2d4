"""Settings of a request: ``params`` JSON and request parameters against a schema, unknown keys refused."""

from __future__ import annotations

import json
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from omni_runtime.errors import InvalidRequest
from omni_runtime.request import Request


class Params(BaseModel):
    """Base of a pipeline's settings: strict types, no unknown keys, no NaN.

    A field that was left out, or sent as null, has its default; ``None`` as a default means that the stage decides.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    # Read by the stage's own queue, before the rest is looked at.
    priority: Literal["high", "normal"] = "normal"

    @classmethod
    def of(cls, request: Request) -> Self:
        """The settings of ``request``, from its ``params`` tensor and its request parameters.

        Raises:
            InvalidRequest: not a JSON object, a key in both places, an unknown key, a value that does not fit;
                ``param`` names the key.
        """
        values = _object(request.text("params", "{}") or "{}")
        for name, value in request.parameters.items():
            if name in values:
                raise InvalidRequest(f"{name} is both in params and a request parameter", param=name)
            values[name] = cls._from_parameter(name, value)
        return cls.check(values)

    @classmethod
    def check(cls, values: dict[str, Any]) -> Self:
        """Validate ``values``; as :meth:`of`."""
        unknown = sorted(values.keys() - cls.model_fields.keys())
        if unknown:
            known = ", ".join(sorted(cls.model_fields))
            raise InvalidRequest(f"{unknown[0]} is not a setting here; there are: {known}", param=unknown[0])
        try:
            return cls.model_validate({name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"][:1])
            reason = str(first["msg"]).removeprefix("Value error, ")
            raise InvalidRequest(f"{where}: {reason[:1].lower()}{reason[1:]}", param=where) from None

    @classmethod
    def _from_parameter(cls, name: str, value: Any) -> Any:
        # Some KServe clients can only send bool, int and string: a list or a fraction then comes as JSON.
        field = cls.model_fields.get(name)
        if not isinstance(value, str) or field is None or field.annotation is str:
            return value
        kinds = get_args(field.annotation) or (field.annotation,)
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return value if str in kinds and not isinstance(parsed, list) else parsed


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"params is not JSON: {error}", param="params") from None
    if not isinstance(values, dict):
        raise InvalidRequest("params must be a JSON object", param="params")
    return values

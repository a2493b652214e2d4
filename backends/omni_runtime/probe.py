"""A real request to a model, to know whether it works: being loaded, and even being alive, is not that.

Every model's config.pbtxt has ``parameters { key: "probe" }``: the inputs of a small request, as JSON. Text is
BYTES[1], true and false BOOL[1], numbers and lists of numbers have the type of the input that they name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import numpy as np

from omni_runtime.errors import Internal, OmniError, Overloaded
from omni_runtime.kserve import Array, Connection, Value, parameter

PROBE_SECONDS = 20.0
_TYPES = {"TYPE_FP32": np.float32, "TYPE_INT64": np.int64, "TYPE_INT32": np.int32, "TYPE_UINT8": np.uint8}


def probe_inputs(config: Mapping[str, Any]) -> dict[str, Value] | None:
    """The inputs of a model's probe; None if its configuration has none.

    Raises:
        Internal: the parameter is no JSON object, or names an input that the model has not.
    """
    text = parameter(config, "probe")
    if not text:
        return None
    types = {entry["name"]: entry["data_type"] for entry in config.get("input", [])}
    try:
        return {name: _tensor(value, types[name]) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError, KeyError) as error:
        raise Internal(f"{config.get('name')}: its probe cannot be sent: {error}") from None


def _tensor(value: Any, kind: str) -> Value:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return bool(value)
    tensor: Array = np.atleast_1d(np.array(value, dtype=_TYPES[kind]))
    return tensor


async def probe(connection: Connection, model: str, config: Mapping[str, Any], seconds: float = PROBE_SECONDS) -> None:
    """Return when ``model`` has answered its probe; one that is too busy to take it works.

    Raises:
        OmniError: it did not answer within ``seconds``, or with an error.
    """
    inputs = probe_inputs(config)
    try:
        if inputs is None:
            inputs = {"control": "status"}
        if config.get("model_transaction_policy", {}).get("decoupled"):
            async with aclosing(connection.stream(model, inputs, timeout=seconds)) as answers:
                async for _ in answers:
                    pass
        else:
            await connection.infer(model, inputs, timeout=seconds)
    except Overloaded:
        return
    except OmniError as error:
        error.stage = error.stage or model
        raise

"""Tensors of the KServe v2 protocol: how they lie in a request and in a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from omni_runtime.errors import Internal, InvalidRequest

Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = str | bytes | bool | Array
Outputs: TypeAlias = dict[str, Array]
Parameter: TypeAlias = bool | int | float | str


def array(value: Value) -> Array:
    """The tensor of ``value``: text and bytes as BYTES[1], a bool as BOOL[1], an array as it is."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bool):
        return np.array([value], dtype=np.bool_)
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)
    raise InvalidRequest(f"a tensor is text, bytes, a bool or a numpy array, not {type(value).__name__}")


def encode(
    model: str,
    inputs: Mapping[str, Value],
    *,
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, Parameter] | None = None,
    request_id: str = "",
) -> pb.ModelInferRequest:
    """The request message for ``inputs``; ``outputs`` None asks for all."""
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        tensor = array(value)
        entry = request.inputs.add(name=name, datatype=np_to_triton_dtype(tensor.dtype), shape=tensor.shape)
        if entry.datatype == "BYTES":
            packed = serialize_byte_tensor(tensor)
            request.raw_input_contents.append(packed.item() if packed.size else b"")
        else:
            request.raw_input_contents.append(tensor.tobytes())
    for name in outputs or ():
        request.outputs.add(name=name)
    for name, parameter in (parameters or {}).items():
        entry = request.parameters[name]
        if isinstance(parameter, bool):
            entry.bool_param = parameter
        elif isinstance(parameter, int):
            entry.int64_param = parameter
        elif isinstance(parameter, float):
            entry.double_param = parameter
        else:
            entry.string_param = parameter
    return request


def decode(response: pb.ModelInferResponse) -> Outputs:
    """Name to tensor; a BYTES tensor is an object array of ``bytes``."""
    outputs: Outputs = {}
    for entry, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if entry.datatype == "BYTES":
            flat = deserialize_bytes_tensor(raw)
        else:
            flat = np.frombuffer(raw, dtype=triton_to_np_dtype(entry.datatype))
        outputs[entry.name] = flat.reshape(tuple(entry.shape))
    return outputs


def text(outputs: Mapping[str, Array], name: str, default: str | None = None) -> str:
    """The one string of a BYTES[1] tensor."""
    if name not in outputs:
        if default is None:
            raise Internal(f"the response has no tensor {name!r}")
        return default
    value = outputs[name].reshape(-1)[0]
    return value.decode() if isinstance(value, bytes) else str(value)


def scalar(outputs: Mapping[str, Array], name: str) -> Any:
    """The one number of a one-element tensor, as a Python value."""
    if name not in outputs:
        raise Internal(f"the response has no tensor {name!r}")
    return outputs[name].reshape(-1)[0].item()


def parameter(config: Mapping[str, Any], name: str, default: str = "") -> str:
    """The value of ``parameters { key: name }`` in a model's configuration."""
    return str(config.get("parameters", {}).get(name, {}).get("string_value", default))

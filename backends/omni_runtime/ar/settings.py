"""Engine arguments of the embedded engine: the fields of model.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from omni_runtime.errors import Internal

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``kv_cache_bytes`` bounds the cache: it lowers ``max_num_seqs`` to what fits. ``max_model_len`` counts prompt and
    answer. ``prefill_chunk`` is how many prompt tokens one step computes at most, a multiple of 64: a long prompt
    delays the other requests by no more than that. ``num_threads`` None leaves torch's default.
    """

    device: str = "auto"
    dtype: str = "float32"
    max_num_seqs: int = 8
    max_model_len: int = 2048
    kv_cache_bytes: int | None = None
    prefill_chunk: int = 128
    num_threads: int | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        unknown = sorted(values.keys() - {entry.name for entry in fields(cls)})
        if unknown:
            raise Internal(f"model.json: unknown argument {unknown[0]}")
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "prefill_chunk", "kv_cache_bytes", "num_threads"):
            value = getattr(self, name)
            if value is None and name in ("kv_cache_bytes", "num_threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise Internal(f"model.json: {name} must be a positive whole number")
        if self.prefill_chunk % 64:
            raise Internal("model.json: prefill_chunk must be a multiple of 64")
        if self.dtype not in _DTYPES:
            raise Internal(f"model.json: dtype must be one of {', '.join(_DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

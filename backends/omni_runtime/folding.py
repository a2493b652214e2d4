"""How the chunks of a stream become the one response of a request that does not stream.

A handler only ever yields chunks; this table makes the one-shot result of them, so the two cannot differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from omni_runtime.kserve import Array, Value, array

Join = Callable[[Sequence[Array]], Array]


def _concatenate(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts)


def _join_text(parts: Sequence[Array]) -> Array:
    return np.array([b"".join(bytes(part.reshape(-1)[0]) for part in parts)], dtype=np.object_)


def _join_json(parts: Sequence[Array]) -> Array:
    items = [item for part in parts for item in json.loads(part.reshape(-1)[0])]
    return np.array([json.dumps(items).encode()], dtype=np.object_)


def _sum(parts: Sequence[Array]) -> Array:
    return np.asarray(sum(parts[1:], parts[0]))


def _first(parts: Sequence[Array]) -> Array:
    return parts[0]


def _last(parts: Sequence[Array]) -> Array:
    return parts[-1]


# Everything that is not listed is a fact about the whole: the last one counts.
RULES: Mapping[str, Join] = {
    "audio": _concatenate,
    "token_ids": _concatenate,
    "hidden_states": _concatenate,
    "text": _join_text,
    "text_output": _join_text,
    "logprobs": _join_json,
    "segments": _join_json,
    "num_output_tokens": _sum,
    "offset": _first,
    "input_text": _first,
}


def fold(chunks: Sequence[Mapping[str, Value]]) -> dict[str, Array]:
    """The one response that ``chunks`` add up to."""
    parts: dict[str, list[Array]] = {}
    for chunk in chunks:
        for name, value in chunk.items():
            parts.setdefault(name, []).append(array(value))
    return {name: RULES.get(name, _last)(values) for name, values in parts.items()}

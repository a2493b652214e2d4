"""Settings of one generation, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from omni_runtime.errors import InvalidRequest

GREEDY_BELOW = 1e-5
_SEED_RANGE = range(-(2**63), 2**63)
_STOP_STRINGS, _STOP_LENGTH = 64, 1000


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Checked settings; the names, meanings and defaults of vLLM's SamplingParams.

    ``max_tokens`` None generates until the model's length ends it. ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is
    off. ``seed`` None draws one; 0 is a seed. ``logprobs`` k reports the k most probable tokens beside the chosen one.
    A ``stop`` string may be one string or a list; it is not delivered unless ``include_stop_str_in_output``.

    Raises:
        InvalidRequest: a value of the wrong type or out of range; ``param`` names it.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Of a JSON object; null means the default, except for ``max_tokens``, where it means no limit.

        Raises:
            InvalidRequest: as the class, and for a name that is not a setting.
        """
        if not isinstance(values, Mapping):
            raise InvalidRequest("sampling_parameters must be a JSON object", param="sampling_parameters")
        known = {entry.name for entry in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidRequest(
                    f"{name} is not a sampling parameter; there are: {', '.join(sorted(known))}", param=str(name)
                )
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.max_tokens is not None:
            self._integer("max_tokens", 1)
        if self.seed is not None:
            self._integer("seed", _SEED_RANGE.start, _SEED_RANGE.stop - 1)
        if self.logprobs is not None:
            self._integer("logprobs", 0, 20)
        if self._integer("n", 1) != 1:
            raise InvalidRequest("n must be 1: send several requests instead", param="n")
        self._integer("min_tokens", 0)
        self._integer("top_k", -1)
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, math.inf),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            put(self, name, self._number(name, low, high))
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0.0:
                raise InvalidRequest(f"{name} must be above 0", param=name)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", param=name)
        put(self, "stop", self._stop_strings())
        put(self, "stop_token_ids", self._stop_tokens())
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", param="min_tokens"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def _integer(self, name: str, low: int, high: int | None = None) -> int:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{name} must be a whole number", param=name)
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise InvalidRequest(f"{name} must be {wanted}, not {value}", param=name)
        return value

    def _number(self, name: str, low: float, high: float) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{name} must be a number", param=name)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or not low <= value <= high:
            wanted = f"a number of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise InvalidRequest(f"{name} must be {wanted}, not {value:g}", param=name)
        return value

    def _stop_strings(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
            raise InvalidRequest("stop must be a string or a list of strings", param="stop")
        if not all(stop):
            raise InvalidRequest("stop must not hold an empty string", param="stop")
        if len(stop) > _STOP_STRINGS or any(len(text) > _STOP_LENGTH for text in stop):
            raise InvalidRequest(
                f"stop takes at most {_STOP_STRINGS} strings of at most {_STOP_LENGTH} characters", param="stop"
            )
        return tuple(stop)

    def _stop_tokens(self) -> tuple[int, ...]:
        tokens = self.stop_token_ids
        if not isinstance(tokens, list | tuple) or not all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens
        ):
            raise InvalidRequest("stop_token_ids must be a list of token ids", param="stop_token_ids")
        return tuple(tokens)

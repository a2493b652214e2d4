"""What the request schemas are made of: the base that refuses, the table of known fields it refuses, field types."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from omni_runtime.seeds import SEED_LIMIT
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# OpenAI's fields that no pipeline honours, and the values at which they ask for nothing (the documented defaults).
# Any other value is refused by name; a field that is in neither this table nor a schema is unknown, and refused too.
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "chat": {
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "logit_bias": (None, {}),
        "moderation": (None,),
        "parallel_tool_calls": (None, True),
        "prediction": (None,),
        "prompt_cache_key": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None,),
        "reasoning_effort": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    },
    "message": {
        "annotations": (None, []),
        "function_call": (None,),
        "name": (None,),
        "refusal": (None,),
        "tool_call_id": (None,),
        "tool_calls": (None, []),
    },
    "completion": {"best_of": (None, 1), "logit_bias": (None, {}), "suffix": (None, "")},
    "speech": {},
    "transcription": {
        "chunking_strategy": (None, "auto"),
        "include": (None, []),
        "keywords": (None, []),
        "known_speaker_names": (None, []),
        "known_speaker_references": (None, []),
        "languages": (None, []),
    },
}


class Body(BaseModel):
    """A JSON object with exactly these fields and types."""

    model_config = ConfigDict(extra="forbid", strict=True)
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, data: Any) -> Any:
        """Drops the known fields of REFUSED that stand at their defaults, refuses the others by name."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for sent, value in data.items():
            name = sent.removesuffix("[]") if isinstance(sent, str) else sent
            if name not in cls.refused:
                kept[sent] = value
            elif not any(value == default and type(value) is type(default) for default in cls.refused[name]):
                raise PydanticCustomError(
                    "unsupported_parameter", "{param} is not supported: leave it out", {"param": name}
                )
        return kept


class Called(Body):
    """What every route that calls a pipeline takes: the pipeline, and how long and how soon its work is wanted."""

    model: Name
    priority: Literal["high", "normal"] | None = Field("normal", description="extra: high goes before what waits")
    timeout: Annotated[Number, Field(gt=0, le=3600)] | None = Field(
        None, description="extra: seconds after which the answer is no longer wanted, and is a 504"
    )


class Logged(Called):
    """Fields about the caller: they change no answer and are written to the log."""

    user: Text | None = Field(None, description="written to the log")
    safety_identifier: Text | None = Field(None, description="written to the log")
    metadata: dict[str, str] | None = Field(None, description="written to the log")

    def logged(self) -> dict[str, Any]:
        return self.model_dump(include={"user", "safety_identifier", "metadata"}, exclude_none=True)


class StreamOptions(Body):
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}
    include_usage: bool | None = False


def _encodable(text: str) -> str:
    # JSON can spell half of a surrogate pair, which no UTF-8 text can hold.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("holds half of a surrogate pair, which is not Unicode text")
    return text


def many(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _voice(value: Any) -> Any:
    return value["id"] if isinstance(value, dict) and set(value) == {"id"} else value


def _stops(stops: list[str]) -> list[str]:
    if any(not stop for stop in stops):
        raise ValueError("a stop must not be empty")
    return stops


class VoiceId(BaseModel):
    id: str


Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[Text, Field(min_length=1, max_length=256)]
Seed = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Stops = Annotated[
    list[Text], Field(max_length=4), AfterValidator(_stops),
    BeforeValidator(many, json_schema_input_type=str | list[str] | None),
]  # fmt: skip
Voice = Annotated[Name | None, BeforeValidator(_voice, json_schema_input_type=str | VoiceId | None)]
Called.model_rebuild()
Logged.model_rebuild()


class Sampling(Logged):
    """How a pipeline that writes text chooses its tokens; the OpenAI fields, and those that vLLM's server adds."""

    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 and -1: no limit")
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    stop: Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def params(self) -> dict[str, Any]:
        """The pipeline's `params` for what was given; what was left out is the pipeline's to choose."""
        names = {
            "frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
            "min_tokens", "ignore_eos",
        }  # fmt: skip
        given = self.model_dump(include=names, exclude_none=True)
        return given | ({"stop": self.stop} if self.stop else {})

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("value_error", "stream_options needs stream: true", {"param": "stream_options"})
        return self

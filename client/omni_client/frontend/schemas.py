"""The bodies of the POST routes. OpenAI's names and defaults; fields that are not OpenAI's are said to be extras."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from fastapi import UploadFile
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from omni_client.frontend.fields import REFUSED, Body, Called, Logged, Name, Number, Sampling, Seed, Text, Voice, many

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


def conflict(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", f"{param} {message}", {"param": param})


class SpeechRequest(Logged):
    refused: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED["speech"]

    input: Text
    voice: Voice = Field(None, description="left out, or `default`: the pipeline's first voice")
    instructions: Text | None = Field(None, description="refused unless the pipeline has an input of this name")
    response_format: AudioFormat = "mp3"
    speed: Annotated[Number, Field(ge=0.25, le=4)] = 1.0
    stream_format: Literal["audio", "sse"] = "audio"
    seed: Seed | None = Field(None, description="extra: the header x-seed tells the one that was used")

    @model_validator(mode="after")
    def _says_something(self) -> SpeechRequest:
        if not self.input.strip():
            raise conflict("input", "must hold something to say")
        return self


class TranscriptionRequest(Called):
    """A multipart form, so numbers and booleans come as text."""

    model_config = ConfigDict(extra="forbid", strict=False)
    refused: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED["transcription"]

    file: UploadFile
    language: Name | None = None
    prompt: Text | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        default_factory=list, alias="timestamp_granularities[]"
    )
    stream: bool = False
    user: Text | None = Field(None, description="extra: written to the log")

    @model_validator(mode="after")
    def _fit_together(self) -> TranscriptionRequest:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise conflict("timestamp_granularities", "needs response_format verbose_json")
        if self.stream and self.response_format != "json":
            raise conflict("response_format", "must be json when stream is true")
        return self


class InputAudio(Body):
    data: Text = Field(description="base64")
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm"]


class Part(Body):
    type: Literal["text", "input_audio"]
    text: Text | None = None
    input_audio: InputAudio | None = None

    @model_validator(mode="after")
    def _holds_its_type(self) -> Part:
        held = {name for name in ("text", "input_audio") if getattr(self, name) is not None}
        if held != {self.type}:
            raise conflict(self.type, f"must be there, and alone, in a part of type {self.type}")
        return self


class SpokenReply(Body):
    """An assistant's audio of an earlier turn. Replies are not kept, so the transcript must come along."""

    id: Text | None = None
    transcript: Text
    data: Text | None = None
    expires_at: int | None = None


def _shape(content: Any) -> str:
    return "many" if isinstance(content, list) else "plain"


# Tagged, so that an error tells of the shape that was sent and of no other.
Content = Annotated[Annotated[Text | None, Tag("plain")] | Annotated[list[Part], Tag("many")], Discriminator(_shape)]


class Message(Body):
    refused: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED["message"]

    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None
    audio: SpokenReply | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.audio is not None and self.role != "assistant":
            raise conflict("audio", "belongs to messages of the assistant")
        if self.content is None and self.audio is None:
            raise conflict("content", "is required")
        if self.content is not None and self.audio is not None:
            raise conflict("audio", "must not come with content")
        return self


class ChatAudio(Body):
    voice: Voice = None
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"] = "wav"
    speed: Annotated[Number, Field(ge=0.25, le=4)] | None = None
    """An extra."""


class ChatRequest(Sampling):
    refused: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED["chat"]

    messages: Annotated[list[Message], Field(min_length=1)]
    audio: ChatAudio | None = None
    logprobs: bool | None = False
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> ChatRequest:
        if self.modalities is not None and "text" not in self.modalities:
            raise conflict("modalities", "must hold text: audio comes with its transcript")
        if self.audio is not None and not self.speaks:
            raise conflict("audio", "needs audio among the modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise conflict("top_logprobs", "needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise conflict("max_tokens", "differs from max_completion_tokens: give one of them")
        return self

    @property
    def speaks(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampling):
    refused: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED["completion"]

    prompt: Annotated[
        list[Annotated[Text, Field(min_length=1)]], Field(min_length=1),
        BeforeValidator(many, json_schema_input_type=str | list[str]),
    ]  # fmt: skip
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = 16

    @model_validator(mode="before")
    @classmethod
    def _best_of_all(cls, data: Any) -> Any:
        # Of n candidates the best n are all of them.
        if isinstance(data, dict) and type(data.get("best_of")) is int and data["best_of"] == data.get("n", 1):
            return {name: value for name, value in data.items() if name != "best_of"}
        return data

    @model_validator(mode="after")
    def _fit_together(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise conflict("echo", "with logprobs is not supported: prompts have no logprobs")
        return self

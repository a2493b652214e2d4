"""What the chat pipelines share: their settings, and one streamed answer of an autoregressive stage."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from omni_runtime import seeds
from omni_runtime.errors import InvalidRequest
from omni_runtime.params import Params
from omni_runtime.request import Request

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class ChatParams(Params):
    """Settings of a chat pipeline, by the names of vLLM's sampling parameters; the stage's defaults where left out."""

    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=2.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    stop: list[StopString] | None = Field(default=None, max_length=16)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    ignore_eos: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def sampling(self, seed: int) -> str:
        """The stage's ``sampling_parameters``."""
        names = set(ChatParams.model_fields) - {"priority"}
        return json.dumps({**self.model_dump(include=names, exclude_none=True), "seed": seed})

    def drawn_seed(self) -> int:
        return seeds.draw() if self.seed is None else self.seed


class VoiceChatParams(ChatParams):
    """Settings of a chat that also speaks."""

    logprobs: Literal[None] = None
    modalities: list[Literal["text", "audio"]] = Field(default=["text", "audio"], min_length=1)
    voice: str = "default"
    speed: float = Field(default=1.0, ge=0.25, le=4.0)


def read_messages(request: Request) -> list[dict[str, Any]]:
    """The ``messages`` of ``request``: a JSON list of objects; the stage that applies the template looks closer.

    Raises:
        InvalidRequest: not JSON, not a list, empty, or an element that is not an object.
    """
    try:
        messages = json.loads(request.text("messages"))
    except ValueError as error:
        raise InvalidRequest(f"messages is not JSON: {error}", param="messages") from None
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{index}] must be an object", param=f"messages[{index}]")
    return messages

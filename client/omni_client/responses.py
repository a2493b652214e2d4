"""What the SDK receives: the tensors of one response to the types of `types`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omni_runtime.errors import Internal, NotFound
from omni_runtime.folding import fold
from omni_runtime.kserve import Outputs, parameter, scalar, text

from omni_client.types import (
    ChatChunk,
    Model,
    Reply,
    Segment,
    Speech,
    SpeechChunk,
    Transcript,
    TranscriptChunk,
    Usage,
    Word,
    silence,
)


def speech_chunk(outputs: Outputs) -> SpeechChunk:
    return SpeechChunk(
        audio=outputs["audio"],
        sample_rate=scalar(outputs, "sample_rate"),
        offset=scalar(outputs, "offset"),
        text=text(outputs, "text", ""),
        seed=scalar(outputs, "seed"),
        usage=usage(outputs),
    )


def speech(outputs: Outputs) -> Speech:
    chunk = speech_chunk(outputs)
    return Speech(chunk.audio, chunk.sample_rate, chunk.text, chunk.seed, chunk.usage)


def transcript_chunk(outputs: Outputs) -> TranscriptChunk:
    return TranscriptChunk(**_transcript(outputs))


def transcript(outputs: Outputs) -> Transcript:
    return Transcript(**_transcript(outputs))


def chat_chunk(outputs: Outputs) -> ChatChunk:
    offset = scalar(outputs, "offset") if "offset" in outputs else None
    return ChatChunk(offset=offset, **_chat(outputs))


def reply(outputs: Outputs) -> Reply:
    return Reply(**_chat(outputs))


def usage(outputs: Outputs) -> Usage | None:
    """The usage of a last response; chat's and OpenAI's names both count."""
    stated = json.loads(text(outputs, "usage", "") or "null")
    if not stated:
        return None
    return Usage(
        input_tokens=stated.get("input_tokens", stated.get("prompt_tokens", 0)),
        output_tokens=stated.get("output_tokens", stated.get("completion_tokens", 0)),
        total_tokens=stated.get("total_tokens", 0),
        seconds=stated.get("seconds"),
    )


def segment(entry: Mapping[str, Any]) -> Segment:
    """A segment of a pipeline's JSON."""
    words = entry.get("words")
    return Segment(
        **{name: entry[name] for name in Segment.__annotations__ if name in entry and name not in ("tokens", "words")},
        tokens=tuple(entry.get("tokens", ())),
        words=None if words is None else tuple(Word(**word) for word in words),
    )


def model(config: Mapping[str, Any], ready: Mapping[str, bool]) -> Model | None:
    """The pipeline of a server's configuration, or None for a stage. `ready` has every model's readiness."""
    if not (task := parameter(config, "task")):
        return None
    name, stages = str(config["name"]), _names(parameter(config, "stages"))
    return Model(
        name=name,
        task=task,
        ready=all(ready.get(part, False) for part in (name, *stages)),
        voices=_names(parameter(config, "voices")),
        stages=stages,
        audio=any(entry.get("name") == "audio" for entry in config.get("input", ())),
    )


def loaded(index: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Every model of a repository index that was loaded once, and whether it is ready now."""
    states: dict[str, bool] = {}
    for entry in index:
        if state := entry.get("state"):
            states[entry["name"]] = states.get(entry["name"], False) or state == "READY"
    return states


def choose(models: Iterable[Model], task: str, *, audio: bool = False) -> str:
    """The first ready pipeline of `task`; with `audio` one that takes audio, else rather one that does not.

    NotFound says what there is.
    """
    models = list(models)
    fit = [model for model in models if model.ready and model.task == task and (model.audio or not audio)]
    if fit:
        return next((model.name for model in fit if task != "chat" or model.audio == audio), fit[0].name)
    wanted = f"{task} pipeline that takes audio" if audio else f"{task} pipeline"
    there = ", ".join(f"{model.name} ({model.task}{'' if model.ready else ', not ready'})" for model in models)
    raise NotFound(f"the server has no ready {wanted}; it has {there or 'no pipelines'}", param="model")


def together(chunks: Sequence[Outputs]) -> Outputs:
    """The one response that `chunks` add up to. Internal when there are none."""
    if not chunks:
        raise Internal("the server ended the request without a response")
    return fold(chunks)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name for part in listed.split(",") if (name := part.strip()))


def _transcript(outputs: Outputs) -> dict[str, Any]:
    return {
        "text": text(outputs, "text", ""),
        "segments": tuple(segment(entry) for entry in json.loads(text(outputs, "segments", "[]") or "[]")),
        "language": text(outputs, "language", ""),
        "duration": float(scalar(outputs, "audio_duration")) if "audio_duration" in outputs else None,
        "usage": usage(outputs),
    }


def _chat(outputs: Outputs) -> dict[str, Any]:
    optional: dict[str, Any] = {
        name: scalar(outputs, name) for name in ("sample_rate", "seed") if name in outputs and outputs[name].size
    }
    return {
        "text": text(outputs, "text", ""),
        "token_ids": tuple(outputs["token_ids"].reshape(-1).tolist()) if "token_ids" in outputs else (),
        "logprobs": tuple(json.loads(text(outputs, "logprobs", "[]") or "[]") or ()),
        "finish_reason": text(outputs, "finish_reason", ""),
        "audio": outputs["audio"] if "audio" in outputs else silence(),
        "input_text": text(outputs, "input_text", "") or None,
        "usage": usage(outputs),
        **optional,
    }

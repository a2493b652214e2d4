"""What a pipeline that writes text sends, response by response, and the usage of several such answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from omni_runtime.errors import Internal
from omni_runtime.kserve import Outputs, text

from omni_client.frontend.speaking import usage

OUTPUTS = ("text", "finish_reason", "usage")


@dataclass(slots=True)
class Token:
    """One token of the answer, with the alternatives there were, best first."""

    token: str
    logprob: float
    top: list[tuple[str, float]]

    @property
    def bytes(self) -> list[int] | None:
        # A token may be part of a character; then its bytes are not told by its text.
        return None if "\ufffd" in self.token else list(self.token.encode())


@dataclass(slots=True)
class Piece:
    """What one response adds."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None

    @property
    def empty(self) -> bool:
        """Nothing a client could use: such a response only says that the pipeline works on it."""
        return not (self.text or self.tokens or self.finish_reason)

    @classmethod
    def read(cls, outputs: Outputs, top: int | None) -> Piece:
        tokens = [] if top is None else _tokens(outputs, top)
        return cls(text(outputs, "text", ""), tokens, text(outputs, "finish_reason", "") or None, usage(outputs))


@dataclass(slots=True)
class Reply:
    """One whole answer, as far as it has come."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    audio: bytearray = field(default_factory=bytearray)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage


def finished(reply: Reply, model: str) -> str:
    if reply.finish_reason is None:
        raise Internal(f"{model} ended without a finish_reason")
    return reply.finish_reason


def total_usage(prompts: Iterable[list[Reply]]) -> dict[str, int]:
    """Per prompt its answers: the prompt is counted once, what was written for every answer."""
    read = written = 0
    for replies in prompts:
        accounts = [reply.usage or {} for reply in replies]
        read += max((account.get("prompt_tokens", 0) for account in accounts), default=0)
        written += sum(account.get("completion_tokens", 0) for account in accounts)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _tokens(outputs: Outputs, top: int) -> list[Token]:
    ids = [int(token) for token in outputs["token_ids"].reshape(-1)] if "token_ids" in outputs else []
    tables: list[dict[str, Any]] = json.loads(text(outputs, "logprobs", "[]") or "[]")
    if len(tables) != len(ids):
        raise Internal(f"{len(ids)} tokens came with {len(tables)} logprobs")
    tokens = []
    for token_id, table in zip(ids, tables, strict=True):
        chosen = table[str(token_id)]
        ranked = sorted(table.values(), key=lambda entry: -entry["logprob"])[:top]
        alternatives = [(entry["decoded_token"], entry["logprob"]) for entry in ranked]
        tokens.append(Token(chosen["decoded_token"], chosen["logprob"], alternatives))
    return tokens

"""Tokens to text, piece by piece: whole characters only, stop strings never delivered in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """``tokenizers.Tokenizer``."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Text of a growing list of tokens; what was delivered, joined, equals ``decode`` of all of them.

    A token may end within a character, so text that ends in the replacement character waits for the next token. A
    window of the last two deliveries is decoded anew at each step, since some decoders join neighbours.
    """

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._delivered = 0  # tokens of the window whose text is out

    def push(self, token: int) -> str:
        """The text that ``token`` completes, perhaps empty."""
        self._window.append(token)
        return self._take(final=False)

    def flush(self) -> str:
        """What still waits: the replacement characters of an unfinished end."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._decode(self._window[: self._delivered])
        text = self._decode(self._window)
        if len(text) <= len(before) or (text.endswith(_UNFINISHED) and not final):
            return ""
        del self._window[: self._delivered]
        self._delivered = len(self._window)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip) if tokens else ""


class StopText:
    """Finds stop strings in text that arrives in pieces, and holds back what may become one."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What can be delivered, and the stop string that ended the text (the first to begin), if one did."""
        text = self._held + text
        found = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self._held = ""
            at, stop = found
            return text[: at + len(stop) if self._include else at], stop
        held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that ``stop`` begins with."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0

"""Text into pieces that can be spoken one after the other, whole or while it is still being written.

A piece ends after a sentence's final punctuation or a line; one longer than ``limit`` characters is cut at a clause,
else at a space, else hard. The pieces put together are the text, without the white space between them.
"""

from __future__ import annotations

import re

LIMIT = 400
# What a full stop follows without ending a sentence.
_WORDS = """
    adm approx apr assn asst aug ave bldg blvd bros capt cf cmdr co col corp dec dept dr e.g eg est etc
    ext feb fig ft gen gov hon hr hrs i.e inc jan jr jul jun lt ltd maj mar mfg min mr mrs ms mt nov oct
    pp prof pvt rd rep rev sec sen sep sept sgt sr st tel u.k u.s univ v vol vs
"""
ABBREVIATIONS = frozenset(_WORDS.split())
_END = re.compile(r"[.!?…。！？]+[\"'”’»)\]]*(?=\s)|\n+")
_CLAUSE = re.compile(r"[,;:—–][\"'”’)\]]*\s")


def split_sentences(text: str, limit: int = LIMIT) -> list[str]:
    """The pieces of a whole text."""
    splitter = SentenceSplitter(limit)
    return [*splitter.push(text), *splitter.close()]


class SentenceSplitter:
    """Takes text as it is written and gives pieces as soon as it is certain where they end."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._text = ""

    def push(self, text: str) -> list[str]:
        """The pieces that ``text`` completes."""
        self._text += text
        return self._take(final=False)

    def close(self) -> list[str]:
        """What is left."""
        pieces = self._take(final=True)
        rest, self._text = self._text.strip(), ""
        return [*pieces, rest] if rest else pieces

    def _take(self, *, final: bool) -> list[str]:
        pieces = []
        while (end := self._next_end(final)) is not None:
            piece, self._text = self._text[:end].strip(), self._text[end:].lstrip()
            if piece:
                pieces.append(piece)
        return pieces

    def _next_end(self, final: bool) -> int | None:
        for match in _END.finditer(self._text):
            if match.end() > self._limit:
                break
            rest = self._text[match.end() :].lstrip()
            if match[0][0] == "\n" or (rest and _ends_sentence(self._text, match, rest)):
                return match.end()
            if not rest and not final:
                return None
        if len(self._text) > self._limit:
            return self._cut()
        return None

    def _cut(self) -> int:
        """Where to cut a sentence that is too long: the last clause border, else the last space, else the limit."""
        head = self._text[: self._limit]
        clauses = [match.end() for match in _CLAUSE.finditer(head)]
        if clauses and clauses[-1] > self._limit // 4:
            return clauses[-1]
        space = head.rfind(" ")
        return space + 1 if space > self._limit // 4 else self._limit


def _ends_sentence(text: str, match: re.Match[str], rest: str) -> bool:
    if match[0][0] not in ".…":
        return True
    if rest[0].islower():
        return False
    if match[0].startswith(("..", "…")):
        return True
    word = text[: match.start()].rsplit(maxsplit=1)[-1:] or [""]
    bare = word[0].strip("\"'“‘([").lower()
    initial = len(bare) == 1 and bare.isalpha() and bare != "i"
    return not (bare in ABBREVIATIONS or initial)

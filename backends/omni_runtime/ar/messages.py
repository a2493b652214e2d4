"""What goes into an AR engine and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omni_runtime.errors import InvalidRequest


@dataclass(frozen=True)
class Prompt:
    """One of: ``text``, ``token_ids`` [T], or ``embeds`` [T, H] (the network's input embeddings, any float type).

    ``source`` names the caller's field that it was made of, for error messages; by default the stage's tensor.
    ``special_tokens`` False keeps the tokenizer from adding its own to ``text``, for text that has them already.

    Raises:
        InvalidRequest: none or several are given.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    embeds: torch.Tensor | None = None
    source: str = ""
    special_tokens: bool = True

    def __post_init__(self) -> None:
        given = [name for name in ("text", "token_ids", "embeds") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                "give one of text_input, prompt_token_ids and prompt_embeds" + (", not several" if given else ""),
                param=self.field if given else "text_input",
            )

    @property
    def field(self) -> str:
        """What an error about this prompt names."""
        if self.source:
            return self.source
        if self.embeds is not None:
            return "prompt_embeds"
        return "prompt_token_ids" if self.token_ids is not None else "text_input"


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability in the raw distribution (before penalties and temperature).

    ``rank`` is 1 for the most probable token. ``decoded_token`` is the token's own text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class Delta:
    """What was generated since the previous delta of the same request.

    ``token_ids`` has all k new tokens, those of a stop string and the end-of-text token as well; ``text`` is what can
    be delivered so far, so it may lag behind the tokens (half a character, what may become a stop string) and may be
    empty. ``offset`` counts the tokens of earlier deltas. ``logprobs`` has one entry per token of the delta.
    ``hidden_states`` [k, H], float32 on the CPU, when tapped: row i is the network's last hidden state, after the final
    norm, from which token i was sampled. ``finish_reason`` is ``stop`` or ``length`` on the last delta;
    ``stop_reason`` is the stop string or stop token id that ended it (None for the model's own end).
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offset: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    hidden_states: torch.Tensor | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    cumulative_logprob: float | None = None

    def merge(self, later: Delta) -> None:
        """Append ``later``, which follows directly."""
        assert later.offset == self.offset + len(self.token_ids), "deltas must be merged in order"
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.hidden_states is not None:
            earlier = [] if self.hidden_states is None else [self.hidden_states]
            self.hidden_states = torch.cat([*earlier, later.hidden_states])
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.cumulative_logprob = later.cumulative_logprob


@dataclass(frozen=True)
class Stats:
    """A moment of an engine: requests by state, and totals since the start."""

    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    kv_cache_bytes: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

"""One request inside the embedded engine: how far it is, and what its tokens mean to the consumer."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from omni_runtime.ar.delivery import Mailbox
from omni_runtime.ar.detokenizer import Decoder, Detokenizer, StopText
from omni_runtime.ar.messages import Delta, Logprob
from omni_runtime.ar.sampler import Ranked, Sampler
from omni_runtime.ar.sampling import Sampling


@dataclass(eq=False)
class Sequence:
    """``prompt`` has the token ids, zeros where ``embeds`` [T, H] take their place. ``computed`` prompt positions are
    in the cache, in ``slot`` once one is given. ``token_limit`` is how many tokens may be generated.
    """

    request_id: str
    prompt: list[int]
    embeds: Tensor | None
    sampling: Sampling
    sampler: Sampler
    decoder: Decoder
    eos_ids: frozenset[int]
    token_limit: int
    hidden_states: bool
    mailbox: Mailbox
    slot: int = -1
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.decoder, self.sampling.skip_special_tokens)
        self._stop_text = StopText(self.sampling.stop, self.sampling.include_stop_str_in_output)
        self._cumulative = 0.0

    @property
    def prefilled(self) -> bool:
        return self.computed >= len(self.prompt)

    def accept(self, token: int, best: Ranked | None, hidden: Tensor | None) -> Delta:
        """Take the sampled token in; the delta says whether the sequence has ended."""
        delta = Delta(
            token_ids=[token], offset=len(self.tokens), num_prompt_tokens=len(self.prompt), hidden_states=hidden
        )
        self.tokens.append(token)
        self.sampler.accept(token)
        if best is not None:
            self._cumulative += best.logprob
            delta.cumulative_logprob = self._cumulative
            delta.logprobs = [self._logprobs(token, best)]
        self._text(token, delta)
        if delta.finish_reason is None and len(self.tokens) >= self.token_limit:
            delta.finish_reason = "length"
            self._flush(delta)
        return delta

    def _text(self, token: int, delta: Delta) -> None:
        sampling, count = self.sampling, len(self.tokens)
        ends = count > sampling.min_tokens and (
            token in sampling.stop_token_ids or (token in self.eos_ids and not sampling.ignore_eos)
        )
        if ends:
            delta.finish_reason = "stop"
            delta.stop_reason = token if token in sampling.stop_token_ids else None
            if sampling.include_stop_str_in_output:
                delta.text = self._detokenizer.push(token)
            self._flush(delta)
            return
        text = self._detokenizer.push(token)
        if sampling.stop and count > sampling.min_tokens:
            text, stop = self._stop_text.push(text)
            if stop is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop
        delta.text = text

    def _flush(self, delta: Delta) -> None:
        """The text that was held back; it may still hold a stop string, when half a character hid its end."""
        text = delta.text + self._detokenizer.flush()
        if self.sampling.stop and len(self.tokens) > self.sampling.min_tokens:
            text, stop = self._stop_text.push(text)
            if stop is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop
            else:
                text += self._stop_text.flush()
        delta.text = text

    def _logprobs(self, token: int, best: Ranked) -> dict[int, Logprob]:
        # The chosen token comes first, as in vLLM.
        entries = {token: (best.logprob, best.rank)}
        for rank, (other, value) in enumerate(zip(best.top_ids, best.top_logprobs, strict=True), 1):
            entries.setdefault(other, (value, rank))
        return {
            other: Logprob(value, rank, self.decoder.decode([other], skip_special_tokens=False))
            for other, (value, rank) in entries.items()
        }

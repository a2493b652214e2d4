"""From logits to a token: vLLM's order of operations, one row at a time, so that no row depends on another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_runtime.ar.sampling import Sampling

# The most probable tokens nearly always hold the mass that top_p asks for; sorting a whole vocabulary is slow.
_SHORTLISTS = (128, 2048)
_COLDEST = 0.01


class Sampler:
    """The sampling state of one request.

    Args:
        sampling: its settings, with a seed.
        vocab_size: size of a row of logits.
        prompt: the prompt's token ids (empty for embeddings), which the repetition penalty counts too.
        stop_ids: tokens that end the generation, forbidden before ``min_tokens``.
    """

    def __init__(
        self, sampling: Sampling, seed: int, vocab_size: int, prompt: list[int], stop_ids: frozenset[int]
    ) -> None:
        self.sampling = sampling
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.generated = 0
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self.counts = self.seen = None
        if sampling.penalised:
            self.counts = torch.zeros(vocab_size)
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(prompt, dtype=torch.int64)] = True

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the most probable one."""
        return self.sampling.greedy and self.counts is None and self.generated >= self.sampling.min_tokens

    def sample(self, logits: Tensor) -> int:
        """The next token of float32 ``logits`` [V], which are left as they are."""
        sampling = self.sampling
        if self.counts is not None and self.seen is not None:
            logits = penalise(logits, sampling, self.counts, self.seen)
        if self.generated < sampling.min_tokens and len(self.stop_ids):
            logits = logits.index_fill(0, self.stop_ids, -math.inf)
        if sampling.greedy:
            return int(logits.argmax())
        values, indices = candidates(logits / max(sampling.temperature, _COLDEST), sampling)
        return int(indices[draw(values, self.generator)])

    def accept(self, token: int) -> None:
        """Count ``token`` as generated."""
        self.generated += 1
        if self.counts is not None and self.seen is not None:
            self.counts[token] += 1
            self.seen[token] = True


def penalise(logits: Tensor, sampling: Sampling, counts: Tensor, seen: Tensor) -> Tensor:
    """Repetition penalty on tokens of prompt and answer, frequency and presence penalties on those of the answer."""
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p leave of scaled ``logits`` [V]: logits and token ids, [C] each.

    min_p keeps tokens at least min_p times as probable as the best. top_k keeps k. top_p then keeps the smallest
    set of the most probable whose share of what is left reaches it. All keep at least one.
    """
    size = len(logits)
    floor = float(logits.max()) + math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    if sampling.top_k > 0:
        values, indices = logits.topk(min(sampling.top_k, size))
        kept = max(1, int((values >= floor).sum()))
        values, indices = values[:kept], indices[:kept]
    elif sampling.top_p < 1:
        if floor > -math.inf:
            logits = logits.masked_fill(logits < floor, -math.inf)
        total = logits.logsumexp(0)
        for count in (*(n for n in _SHORTLISTS if n < size), size):
            values, indices = logits.topk(count)
            # The margin leaves no doubt about rounding: the shortlist decides exactly as the whole would.
            if count == size or float((values - total).exp().sum(dtype=torch.float64)) > sampling.top_p + 1e-4:
                break
        shares = (values - total).exp().to(torch.float64)
        kept = max(1, int((shares.cumsum(0) - shares < sampling.top_p).sum()))
        return values[:kept], indices[:kept]
    elif sampling.min_p > 0:
        indices = (logits >= floor).nonzero()[:, 0]
        return logits[indices], indices
    else:
        return logits, torch.arange(size)
    if sampling.top_p < 1:
        shares = values.to(torch.float64).softmax(0)
        kept = max(1, int((shares.cumsum(0) - shares < sampling.top_p).sum()))
        values, indices = values[:kept], indices[:kept]
    return values, indices


def draw(logits: Tensor, generator: torch.Generator) -> int:
    """An index of ``logits`` [C], by one uniform number through the inverse of the cumulative distribution."""
    cumulative = (logits - logits.max()).exp().cumsum(0, dtype=torch.float64)
    point = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    return min(int(torch.searchsorted(cumulative, point, right=True)), len(logits) - 1)


@dataclass(frozen=True)
class Ranked:
    """Raw log-probabilities of one step: the chosen token's and its rank, and the k best (ids and values)."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def ranked(logits: Tensor, token: int, count: int) -> Ranked:
    """Of raw ``logits`` [V]; vLLM's rank: how many tokens are at least as probable."""
    total = float(logits.logsumexp(0))
    values, indices = logits.topk(min(count, len(logits)))
    chosen = logits[token]
    return Ranked(
        logprob=float(chosen) - total,
        rank=int((logits >= chosen).sum()),
        top_ids=indices.tolist(),
        top_logprobs=[value - total for value in values.tolist()],
    )

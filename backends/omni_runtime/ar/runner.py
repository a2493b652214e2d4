"""The steps of the embedded engine: which sequences run, what one forward pass computes, and what comes of it.

Everything here belongs to the engine's thread.
"""

from __future__ import annotations

import heapq
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from omni_runtime.ar.delivery import Mailbox
from omni_runtime.ar.network import PREFILL_BLOCK, Architecture, Llama, Segment, SlotCache
from omni_runtime.ar.sampler import ranked
from omni_runtime.ar.sequence import Sequence
from omni_runtime.ar.settings import Settings
from omni_runtime.errors import Internal


class Runner:
    """The network, its cache, and the sequences that have a slot of it. Loads and warms up when made.

    Args:
        directory: the checkpoint.
        slots: how many sequences run at once.
        length: positions of a slot: the longest prompt and answer.
    """

    def __init__(
        self, directory: Path, architecture: Architecture, settings: Settings, slots: int, length: int
    ) -> None:
        self.running: list[Sequence] = []
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self._chunk_tokens = settings.prefill_chunk
        self._prefilling: deque[Sequence] = deque()
        self._free = list(range(slots))
        self._network = Llama(directory, architecture, settings.torch_dtype, settings.torch_device)
        self._cache = SlotCache(architecture, slots, length, settings.torch_dtype, settings.torch_device)
        self._warm_up(slots)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def admit(self, sequence: Sequence) -> None:
        """Give ``sequence`` a slot: the lowest, so that the decoding rows stay few."""
        sequence.slot = heapq.heappop(self._free)
        self.running.append(sequence)
        self._prefilling.append(sequence)

    def release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        heapq.heappush(self._free, sequence.slot)

    def fail(self, error: Exception) -> list[Sequence]:
        """End all that run with ``error``; returns them."""
        failed = list(self.running)
        for sequence in failed:
            self._cache.clear(sequence.slot)
            self.release(sequence)
            sequence.mailbox.fail(error)
        Mailbox.wake(sequence.mailbox for sequence in failed)
        return failed

    def step(self) -> list[Sequence]:
        """One forward pass: a token for every sequence that decodes, and a chunk of the prompts that wait.

        Returns the sequences that have ended.
        """
        decoding = [s for s in self.running if s.prefilled]
        segments = self._chunk()
        # Rows that decode lie at their slot's number, so that the cache is read in place.
        rows = max((s.slot for s in decoding), default=-1) + 1
        ids, positions, lengths = [0] * rows, [self._cache.scratch] * rows, [1] * rows
        slots = list(range(rows))
        sampled: list[tuple[int, Sequence]] = []
        for s in decoding:
            ids[s.slot] = s.tokens[-1]
            positions[s.slot] = len(s.prompt) + len(s.tokens) - 1
            lengths[s.slot] = positions[s.slot] + 1
            sampled.append((s.slot, s))
        placed: list[Segment] = []
        embeds: list[tuple[int, Tensor]] = []
        for s, count in segments:
            span = slice(s.computed, s.computed + count)
            placed.append(Segment(len(ids), s.slot, s.computed, count))
            if s.embeds is not None:
                embeds.append((len(ids), s.embeds[span]))
            ids += s.prompt[span]
            positions += range(span.start, span.stop)
            slots += [s.slot] * count
            s.computed += count
            if s.prefilled:
                sampled.append((len(ids) - 1, s))
        hidden = self._forward(ids, positions, slots, lengths, placed, embeds)
        self.steps += 1
        self.prompt_tokens += sum(count for _, count in segments)
        self._prefilling = deque(s for s in self._prefilling if not s.prefilled)
        if not sampled:
            return []
        rows_sampled = torch.tensor([row for row, _ in sampled], device=hidden.device)
        return self._emit(hidden[rows_sampled], [s for _, s in sampled])

    def _chunk(self) -> list[tuple[Sequence, int]]:
        """Which prompts go on in this step, and by how many tokens.

        They take turns block by block, so that a short prompt does not wait for a long one.
        """
        counts: dict[Sequence, int] = {}
        budget = self._chunk_tokens
        turn = deque(self._prefilling)
        while turn and budget > 0:
            sequence = turn.popleft()
            done = counts.get(sequence, 0)
            take = min(PREFILL_BLOCK, len(sequence.prompt) - sequence.computed - done)
            if take > budget:
                break
            counts[sequence] = done + take
            budget -= take
            if sequence.computed + done + take < len(sequence.prompt):
                turn.append(sequence)
        self._prefilling.rotate(-len(counts))
        return list(counts.items())

    def _forward(
        self,
        ids: list[int],
        positions: list[int],
        slots: list[int],
        lengths: list[int],
        segments: list[Segment],
        embeds: list[tuple[int, Tensor]],
    ) -> Tensor:
        device = self._network.device
        padding = _padded(len(ids)) - len(ids)
        x = self._network.embed(torch.tensor(ids + [0] * padding, device=device))
        for row, block in embeds:
            x[row : row + len(block)] = block.to(device, x.dtype)
        return self._network.forward(
            x,
            torch.tensor(positions + [self._cache.scratch] * padding, device=device),
            torch.tensor(slots + [0] * padding, device=device),
            torch.tensor(lengths, dtype=torch.int64, device=device),
            segments,
            self._cache,
        )

    def _emit(self, hidden: Tensor, sequences: list[Sequence]) -> list[Sequence]:
        """Sample a token for each of ``sequences`` from its row of ``hidden`` [R, H], and send it.

        Returns the sequences that have ended.
        """
        logits = self._network.logits(hidden)
        finite = torch.isfinite(hidden).all(-1).tolist()
        best: list[int] = logits.argmax(-1).tolist()
        if any(not s.sampler.plain or s.sampling.logprobs is not None for s in sequences):
            logits = logits.cpu()
        taps = hidden.float().cpu() if any(s.hidden_states for s in sequences) else None
        ended: list[Sequence] = []
        for row, s in enumerate(sequences):
            if s.aborted:
                continue
            if not finite[row]:
                self._cache.clear(s.slot)
                s.mailbox.fail(Internal("the network's output is not finite for this prompt"))
                ended.append(s)
                continue
            token = best[row] if s.sampler.plain else s.sampler.sample(logits[row])
            ranks = None if s.sampling.logprobs is None else ranked(logits[row], token, s.sampling.logprobs)
            tap = taps[row : row + 1].clone() if taps is not None and s.hidden_states else None
            delta = s.accept(token, ranks, tap)
            s.mailbox.put(delta)
            self.generated_tokens += 1
            if delta.finish_reason is not None:
                ended.append(s)
        for s in ended:
            self.release(s)
        Mailbox.wake(s.mailbox for s in sequences)
        return ended

    def _warm_up(self, slots: int) -> None:
        # oneDNN compiles its kernels once for each number of rows.
        network, scratch, rows = self._network, self._cache.scratch, 1
        while rows < slots + self._chunk_tokens:
            rows = _padded(rows + 1)
            self._forward([0] * rows, [scratch] * rows, [0] * rows, [1] * min(rows, slots), [], [])
        for count in range(1, slots + 1):
            network.logits(torch.zeros(count, network.arch.hidden_size, dtype=network.dtype, device=network.device))


def _padded(rows: int) -> int:
    """The number of rows that a step is padded to: few sizes, since each has kernels of its own; at least two."""
    return max(2, rows) if rows <= 8 else -(-rows // 16) * 16

"""The embedded engine: continuous batching over a slot cache, on a thread of its own.

A request's life: ``generate`` checks it and puts it in the waiting queue; at the next step it gets a slot of the cache, if one
is free; its prompt is computed in blocks beside the tokens of the others; then each step gives it a token, until it ends
or is aborted, and its slot is free for the next step. The thread sleeps when there is nothing to do.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from omni_runtime import seeds
from omni_runtime.ar.delivery import Mailbox
from omni_runtime.ar.engine import HIDDEN_STATES
from omni_runtime.ar.messages import Delta, Prompt, Stats
from omni_runtime.ar.network import PREFILL_BLOCK, Architecture, Llama, Segment, SlotCache
from omni_runtime.ar.sampler import Ranked, Sampler, ranked
from omni_runtime.ar.sampling import Sampling
from omni_runtime.ar.sequence import Sequence
from omni_runtime.ar.settings import Settings
from omni_runtime.errors import Cancelled, Internal, InvalidRequest

log = logging.getLogger(__name__)


class TorchEngine:
    """An :class:`~omni_runtime.ar.engine.Engine` over a Llama checkpoint (config.json, *.safetensors, tokenizer.json).

    Raises:
        Internal: the checkpoint is of another kind, or not one sequence fits ``kv_cache_bytes``.
    """

    name = "torch"

    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.device = str(self.settings.torch_device)
        self.architecture = Architecture.read(directory)
        self.max_model_len = min(self.settings.max_model_len, self.architecture.max_positions)
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._slot_bytes = SlotCache.slot_bytes(self.architecture, self.max_model_len, self.settings.torch_dtype)
        self._slots = self.settings.max_num_seqs
        if self.settings.kv_cache_bytes is not None:
            self._slots = min(self._slots, self.settings.kv_cache_bytes // self._slot_bytes)
        if not self._slots:
            raise Internal(
                f"kv_cache_bytes {self.settings.kv_cache_bytes} is less than one sequence's {self._slot_bytes}"
            )

        self._wanted = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._prefilling: deque[Sequence] = deque()
        self._free = list(range(self._slots))
        self._closed = False
        self._steps = self._prompt_tokens = self._generated_tokens = 0

        self._ready = threading.Event()
        self._load_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(directory,), name="ar-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._load_error is not None:
            self._thread.join()
            raise self._load_error

    # The consumers' side: any event loop.

    async def generate(
        self, prompt: Prompt, sampling: Sampling, request_id: str, taps: frozenset[str] = frozenset()
    ) -> AsyncIterator[Delta]:
        """See :meth:`omni_runtime.ar.engine.Engine.generate`."""
        sequence = self._sequence(prompt, sampling, request_id, taps)
        with self._wanted:
            if self._closed:
                raise Internal("the engine is closed")
            if request_id in self._by_id:
                raise InvalidRequest(f"request id {request_id} is in flight already", param="request_id")
            self._by_id[request_id] = sequence
            self._waiting.append(sequence)
            self._wanted.notify()
        try:
            while True:
                delta = await sequence.mailbox.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._abort(sequence)

    async def abort(self, request_id: str) -> None:
        """See :meth:`omni_runtime.ar.engine.Engine.abort`."""
        with self._wanted:
            sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._abort(sequence)
            sequence.mailbox.fail(Cancelled("the request was stopped"))
            Mailbox.wake([sequence.mailbox])

    async def close(self) -> None:
        """See :meth:`omni_runtime.ar.engine.Engine.close`."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """:meth:`close` without an event loop; waits for the step in progress."""
        with self._wanted:
            self._closed = True
            self._wanted.notify()
        self._thread.join()

    def stats(self) -> Stats:
        with self._wanted:
            return Stats(
                running=len(self._running),
                waiting=len(self._waiting),
                free_slots=len(self._free),
                kv_cache_bytes=self._slots * self._slot_bytes,
                steps=self._steps,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
            )

    def _sequence(self, prompt: Prompt, sampling: Sampling, request_id: str, taps: frozenset[str]) -> Sequence:
        vocab = self.architecture.vocab_size
        if unknown := sorted(taps - {HIDDEN_STATES}):
            raise InvalidRequest(
                f"{unknown[0]} is not a tap of this stage; there is: {HIDDEN_STATES}", param=unknown[0]
            )
        if any(token >= vocab for token in sampling.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids must be below the vocabulary's size {vocab}", param="stop_token_ids")
        embeds = self._embeds(prompt)
        token_ids = [0] * len(embeds) if embeds is not None else self._token_ids(prompt)
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param=prompt.field)
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens, but the model's length is {self.max_model_len} "
                "with at least one token of answer",
                param=prompt.field,
            )
        eos = self.architecture.eos_token_ids
        seed = seeds.draw() if sampling.seed is None else sampling.seed
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
        return Sequence(
            request_id=request_id,
            prompt=token_ids,
            embeds=embeds,
            sampling=sampling,
            sampler=Sampler(sampling, seed, vocab, [] if embeds is not None else token_ids, stop_ids),
            decoder=self._tokenizer,
            eos_ids=eos,
            token_limit=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
            hidden_states=HIDDEN_STATES in taps,
            mailbox=Mailbox(),
        )

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if prompt.text is not None:
            return self._tokenizer.encode(prompt.text, add_special_tokens=prompt.special_tokens).ids
        token_ids = prompt.token_ids or []
        if any(not 0 <= token < self.architecture.vocab_size for token in token_ids):
            raise InvalidRequest(f"token ids must be from 0 to {self.architecture.vocab_size - 1}", param=prompt.field)
        return list(token_ids)

    def _embeds(self, prompt: Prompt) -> Tensor | None:
        if prompt.embeds is None:
            return None
        size = self.architecture.hidden_size
        if prompt.embeds.dim() != 2 or prompt.embeds.shape[1] != size or not prompt.embeds.is_floating_point():
            raise InvalidRequest(
                f"embeddings must be [tokens, {size}] of a float type, not {list(prompt.embeds.shape)}",
                param=prompt.field,
            )
        if not bool(torch.isfinite(prompt.embeds).all()):
            raise InvalidRequest("embeddings must be finite", param=prompt.field)
        return prompt.embeds

    def _abort(self, sequence: Sequence) -> None:
        with self._wanted:
            sequence.aborted = True
            if self._by_id.get(sequence.request_id) is sequence:
                del self._by_id[sequence.request_id]
            self._wanted.notify()

    # The engine's side: its own thread.

    def _run(self, directory: Path) -> None:
        with torch.inference_mode():
            try:
                self._load(directory)
            except BaseException as error:
                self._load_error = error
                return
            finally:
                self._ready.set()
            while self._schedule():
                try:
                    self._step()
                except Exception as error:
                    log.exception("a step failed")
                    self._fail_all(Internal(f"the network failed: {type(error).__name__}: {error}"))
        self._fail_all(Internal("the engine was closed"))

    def _load(self, directory: Path) -> None:
        settings, device = self.settings, self.settings.torch_device
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._network = Llama(directory, self.architecture, settings.torch_dtype, device)
        self._cache = SlotCache(self.architecture, self._slots, self.max_model_len, settings.torch_dtype, device)
        # oneDNN compiles its kernels once for each number of rows.
        rows, most = 1, self._slots + settings.prefill_chunk
        while rows < most:
            rows = _padded(rows + 1)
            self._forward([0] * rows, [self._cache.scratch] * rows, [0] * rows, [1] * min(rows, self._slots), [], [])
        for count in (1, 2, self._slots):
            self._network.logits(
                torch.zeros(count, self.architecture.hidden_size, dtype=settings.torch_dtype, device=device)
            )

    def _schedule(self) -> bool:
        """Wait for work, drop what was aborted, give free slots away; False when the engine is closed."""
        with self._wanted:
            while True:
                for sequence in [s for s in self._running if s.aborted]:
                    self._release(sequence)
                self._waiting = deque(s for s in self._waiting if not s.aborted)
                while self._waiting and self._free:
                    sequence = self._waiting.popleft()
                    # The lowest free slot, so that the decoding rows stay few.
                    sequence.slot = heapq.heappop(self._free)
                    self._running.append(sequence)
                    self._prefilling.append(sequence)
                if self._closed or self._running:
                    return not self._closed
                self._wanted.wait()

    def _release(self, sequence: Sequence) -> None:
        """Take a sequence out of the step; the caller holds the lock."""
        self._running.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        heapq.heappush(self._free, sequence.slot)
        if self._by_id.get(sequence.request_id) is sequence:
            del self._by_id[sequence.request_id]

    def _fail_all(self, error: Exception) -> None:
        with self._wanted:
            failed = [*self._running, *self._waiting]
            for sequence in list(self._running):
                self._cache.clear(sequence.slot)
                self._release(sequence)
            self._waiting.clear()
            self._by_id.clear()
        for sequence in failed:
            sequence.mailbox.fail(error)
        Mailbox.wake(sequence.mailbox for sequence in failed)

    def _step(self) -> None:
        """One forward pass: a token for every sequence that decodes, and a chunk of the prompts that wait."""
        decoding = [s for s in self._running if s.prefilled]
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
        if sampled:
            self._emit(hidden[torch.tensor([row for row, _ in sampled], device=hidden.device)], [s for _, s in sampled])
        with self._wanted:
            self._steps += 1
            self._prompt_tokens += sum(count for _, count in segments)
            self._generated_tokens += len(sampled)
            while self._prefilling and self._prefilling[0].prefilled:
                self._prefilling.popleft()
            self._prefilling = deque(s for s in self._prefilling if not s.prefilled)

    def _chunk(self) -> list[tuple[Sequence, int]]:
        """Which prompts go on in this step and by how many tokens: block by block in turn, so that none waits for a long one."""
        counts: dict[Sequence, int] = {}
        budget = self.settings.prefill_chunk
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

    def _emit(self, hidden: Tensor, sequences: list[Sequence]) -> None:
        """Sample a token for each of ``sequences`` from its row of ``hidden`` [R, H], and send it."""
        logits = self._network.logits(hidden)
        finite = torch.isfinite(hidden).all(-1).tolist()
        best: list[int] = logits.argmax(-1).tolist()
        on_host = (
            logits.cpu() if any(not s.sampler.plain or s.sampling.logprobs is not None for s in sequences) else logits
        )
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
            token = best[row] if s.sampler.plain else s.sampler.sample(on_host[row])
            ranks: Ranked | None = None
            if s.sampling.logprobs is not None:
                ranks = ranked(on_host[row], token, s.sampling.logprobs)
            delta = s.accept(
                token, ranks, taps[row : row + 1].clone() if taps is not None and s.hidden_states else None
            )
            s.mailbox.put(delta)
            if delta.finish_reason is not None:
                ended.append(s)
        with self._wanted:
            for s in ended:
                self._release(s)
        Mailbox.wake(s.mailbox for s in sequences)


def _padded(rows: int) -> int:
    """The number of rows that a step is padded to: few sizes, since each has kernels of its own; at least two."""
    return max(2, rows) if rows <= 8 else -(-rows // 16) * 16

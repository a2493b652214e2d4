"""The embedded engine: continuous batching over a slot cache, on a thread of its own.

A request's life: ``generate`` checks it and puts it in the waiting queue; at the next step it gets a slot of the cache,
if one is free; its prompt is computed in blocks beside the tokens of the others; then each step gives it a token, until
it ends or is aborted, and its slot is free for the next step. The thread sleeps when there is nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from omni_runtime import seeds
from omni_runtime.ar.delivery import Mailbox
from omni_runtime.ar.engine import HIDDEN_STATES
from omni_runtime.ar.messages import Delta, Prompt, Stats
from omni_runtime.ar.network import Architecture, SlotCache
from omni_runtime.ar.runner import Runner
from omni_runtime.ar.sampler import Sampler
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
        self._closed = False

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
    ) -> AsyncGenerator[Delta, None]:
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
                running=len(self._runner.running),
                waiting=len(self._waiting),
                free_slots=self._runner.free_slots,
                kv_cache_bytes=self._slots * self._slot_bytes,
                steps=self._runner.steps,
                prompt_tokens=self._runner.prompt_tokens,
                generated_tokens=self._runner.generated_tokens,
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
                if self.settings.num_threads is not None:
                    torch.set_num_threads(self.settings.num_threads)
                self._runner = Runner(directory, self.architecture, self.settings, self._slots, self.max_model_len)
            except BaseException as error:
                self._load_error = error
                return
            finally:
                self._ready.set()
            while self._schedule():
                if not self._runner.running:
                    continue
                try:
                    self._forget(self._runner.step())
                except Exception as error:
                    log.exception("a step failed")
                    self._forget(self._runner.fail(Internal(f"the network failed: {type(error).__name__}: {error}")))
            self._shut_down(Internal("the engine was closed"))

    def _schedule(self) -> bool:
        """Wait for work, drop what was aborted, give free slots away; False when the engine is closed."""
        runner = self._runner
        with self._wanted:
            self._wanted.wait_for(lambda: self._closed or self._waiting or runner.running)
            for sequence in [s for s in runner.running if s.aborted]:
                runner.release(sequence)
            self._waiting = deque(s for s in self._waiting if not s.aborted)
            while self._waiting and runner.free_slots:
                runner.admit(self._waiting.popleft())
            return not self._closed

    def _forget(self, ended: list[Sequence]) -> None:
        with self._wanted:
            for sequence in ended:
                if self._by_id.get(sequence.request_id) is sequence:
                    del self._by_id[sequence.request_id]

    def _shut_down(self, error: Exception) -> None:
        self._forget(self._runner.fail(error))
        with self._wanted:
            waiting, self._waiting = self._waiting, deque()
        self._forget(list(waiting))
        for sequence in waiting:
            sequence.mailbox.fail(error)
        Mailbox.wake(sequence.mailbox for sequence in waiting)

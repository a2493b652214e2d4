"""An AR stage in Triton: tensors to an engine's prompt and settings, deltas to tensors.

The tensor names are those of Triton's vLLM backend. Of the ``return_*`` inputs, ``return_cumulative_logprob``,
``return_logprobs`` and ``return_hidden_states`` ask for what is otherwise not computed; the others are sent whenever
the output is requested, unless they are false. ``finish_reason`` is empty until the end; ``num_output_tokens`` counts
those of its own response.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
import torch

from omni_runtime import seeds, triton
from omni_runtime.ar.chat import ChatTemplate
from omni_runtime.ar.engine import HIDDEN_STATES, Engine, build
from omni_runtime.ar.messages import Delta, Prompt
from omni_runtime.ar.sampling import Sampling
from omni_runtime.config import StageConfig
from omni_runtime.errors import Internal, InvalidRequest
from omni_runtime.kserve import Value
from omni_runtime.metrics import TritonMetrics
from omni_runtime.request import Request
from omni_runtime.stage import StageLoop, settle

log = logging.getLogger("omni.ar")

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PROMPTS = ("text_input", "prompt_token_ids", "prompt_embeds", "messages")


class ArServer:
    """The stage loop over an engine; ``execute()`` hands requests over and returns."""

    def __init__(self, pb_utils: Any, config: StageConfig) -> None:
        self._pb = pb_utils
        self._engine = build(config.parameters.get("engine", "auto"), config.version_dir, config.arguments)
        metrics, defaults = TritonMetrics(pb_utils, config.name), generation_defaults(config)
        self._handler = ArHandler(self._engine, _template(config), metrics, defaults)
        self._loop = StageLoop(
            config.name,
            self._handler,
            config.limits,
            metrics=self._handler.metrics,
            status=lambda: {"engine": dataclasses.asdict(self._engine.stats())},
        )
        settle()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._loop.submit(triton.decoupled_request(self._pb, request))

    def finalize(self) -> None:
        self._loop.close()
        asyncio.run(self._engine.close())


class ArHandler:
    """The stage's handler: one request to its chunks."""

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate | None,
        metrics: TritonMetrics | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._template = template
        self._defaults = dict(defaults or {})
        self._steps = 0
        self.metrics = metrics
        if metrics is not None:
            metrics.engine(engine.name, engine.device)
        log.info("engine %s on %s", engine.name, engine.device)

    async def __call__(self, request: Request) -> AsyncGenerator[Mapping[str, Value], None]:
        """Chunks of the answer.

        Raises:
            InvalidRequest: naming the tensor or the setting at fault.
        """
        prompt, sampling = self._prompt(request), read_sampling(request, self._defaults)
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=seeds.draw())
        seed = sampling.seed
        prefix = self._prefix(request)
        taps = frozenset({HIDDEN_STATES}) if request.scalar("return_hidden_states", False) else frozenset[str]()
        made = 0
        async with aclosing(self._engine.generate(prompt, sampling, request.id, taps)) as deltas:
            async for delta in deltas:
                if self.metrics is not None:
                    if not made:
                        self.metrics.first_output(time.monotonic() - request.started, "token")
                    self.metrics.tokens(len(delta.token_ids))
                    self._count_steps(self.metrics)
                made += len(delta.token_ids)
                request.progress["tokens"] = made
                yield _chunk(request, delta, prefix, seed)
                prefix = ""

    def _count_steps(self, metrics: TritonMetrics) -> None:
        steps = self._engine.stats().steps
        metrics.steps(steps - self._steps)
        self._steps = steps

    def _prompt(self, request: Request) -> Prompt:
        given = [name for name in PROMPTS if request.has(name)]
        if len(given) != 1:
            what = f"one of {', '.join(PROMPTS)} is required"
            if given:
                raise InvalidRequest(f"{what}, not {len(given)} of them", param=given[-1])
            raise InvalidRequest(what, param=PROMPTS[0])
        name = given[0]
        if name == "text_input":
            return Prompt(text=request.text(name))
        if name == "messages":
            return self._chat(request)
        tensor = request.inputs[name]
        if name == "prompt_token_ids":
            return Prompt(token_ids=[int(token) for token in tensor.reshape(-1)])
        return Prompt(embeds=torch.from_numpy(np.ascontiguousarray(tensor, dtype=np.float32)))

    def _chat(self, request: Request) -> Prompt:
        if self._template is None:
            raise InvalidRequest("this model has no chat template: send text_input", param="messages")
        try:
            messages = json.loads(request.text("messages"))
        except ValueError as error:
            raise InvalidRequest(f"messages is not JSON: {error}", param="messages") from None
        return Prompt(text=self._template.render(messages), source="messages", special_tokens=False)

    def _prefix(self, request: Request) -> str:
        """What stands before the answer: the prompt, as in the vLLM backend, unless streamed or declined."""
        if not request.has("text_input"):
            return ""
        exclude = request.scalar("exclude_input_in_output", request.stream)
        if request.stream and not exclude:
            raise InvalidRequest("a stream does not repeat its input", param="exclude_input_in_output")
        return "" if exclude else request.text("text_input")


def generation_defaults(config: StageConfig) -> dict[str, Any]:
    """The sampling that the model's makers recommend in generation_config.json, as vLLM takes it by default."""
    path = config.version_dir / "generation_config.json"
    recommended = json.loads(path.read_text()) if path.is_file() else {}
    return {name: recommended[name] for name in RECOMMENDED if recommended.get(name) is not None}


def read_sampling(request: Request, defaults: Mapping[str, Any] | None = None) -> Sampling:
    """``sampling_parameters`` and the request parameters of the same names, the same key in both refused.

    ``defaults`` stand for what was left out. An answer to messages is limited by the length of the model where
    ``max_tokens`` is left out; one to a raw prompt by the default of vLLM.
    """
    try:
        values = json.loads(request.text("sampling_parameters", "{}") or "{}")
    except ValueError as error:
        raise InvalidRequest(f"sampling_parameters is not JSON: {error}", param="sampling_parameters") from None
    if not isinstance(values, dict):
        raise InvalidRequest("sampling_parameters must be a JSON object", param="sampling_parameters")
    for name, value in request.parameters.items():
        if name in values:
            raise InvalidRequest(f"{name} is both in sampling_parameters and a request parameter", param=name)
        values[name] = _parsed(value) if name != "stop" else value
    for name, value in (defaults or {}).items():
        if values.get(name) is None:
            values[name] = value
    if request.has("messages"):
        values.setdefault("max_tokens", None)
    asks = request.scalar("return_logprobs", False) or request.scalar("return_cumulative_logprob", False)
    if asks and values.get("logprobs") is None:
        values["logprobs"] = 0
    return Sampling.parse(values)


def _parsed(value: Any) -> Any:
    # Some KServe clients send only bool, int and string: fractions and lists then come as JSON.
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _chunk(request: Request, delta: Delta, prefix: str, seed: int | None) -> dict[str, Value]:
    chunk: dict[str, Value] = {
        "text_output": prefix + delta.text,
        "token_ids": np.array(delta.token_ids, np.int64),
        "offset": np.array([delta.offset], np.int64),
        "seed": np.array([seed], np.int64),
    }
    if request.scalar("return_finish_reason", True):
        chunk["finish_reason"] = delta.finish_reason or ""
    if request.scalar("return_num_input_tokens", True):
        chunk["num_input_tokens"] = np.array([delta.num_prompt_tokens], np.uint32)
    if request.scalar("return_num_output_tokens", True):
        chunk["num_output_tokens"] = np.array([len(delta.token_ids)], np.uint32)
    if delta.logprobs is not None and request.scalar("return_logprobs", True):
        chunk["logprobs"] = json.dumps(
            [{str(token): dataclasses.asdict(entry) for token, entry in step.items()} for step in delta.logprobs]
        )
    if delta.cumulative_logprob is not None and request.scalar("return_cumulative_logprob", True):
        chunk["cumulative_logprob"] = np.array([delta.cumulative_logprob], np.float32)
    if delta.hidden_states is not None:
        chunk["hidden_states"] = delta.hidden_states.numpy()
    return chunk


def _template(config: StageConfig) -> ChatTemplate | None:
    try:
        return ChatTemplate(config.version_dir)
    except Internal as error:
        log.info("%s: no chat: %s", config.name, error)
        return None

"""Pipeline ``smollm2``: chat messages, or a raw prompt, to text."""

import json
from contextlib import aclosing

import numpy as np
from omni_runtime import kserve
from omni_runtime.chat import ChatParams, read_messages
from omni_runtime.errors import InvalidRequest
from omni_runtime.pipeline import Pipeline

OUTPUTS = ["text_output", "token_ids", "finish_reason", "num_input_tokens", "num_output_tokens"]


class TritonPythonModel(Pipeline):
    async def run(self, request):
        params = ChatParams.of(request)
        seed = params.drawn_seed()
        inputs = {"sampling_parameters": params.sampling(seed), **self.prompt(request)}
        made = 0
        wanted = [*OUTPUTS, "logprobs"] if params.logprobs is not None else OUTPUTS
        async with aclosing(self.written(request, inputs, wanted)) as answer:
            async for found in answer:
                chunk = {
                    "text": found["text_output"],
                    "token_ids": found["token_ids"],
                    "finish_reason": found["finish_reason"],
                    "seed": np.array([seed], np.int64),
                }
                made += kserve.scalar(found, "num_output_tokens")
                if "logprobs" in found:
                    chunk["logprobs"] = found["logprobs"]
                if kserve.text(found, "finish_reason"):
                    read = kserve.scalar(found, "num_input_tokens")
                    usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
                    chunk["usage"] = json.dumps(usage)
                yield chunk

    async def written(self, request, inputs, wanted):
        """The stage's answer; an error of its prompt names the field as it is called here."""
        try:
            async with aclosing(self.pools["smollm2_135m"].stream(request, inputs, outputs=wanted)) as answer:
                async for found in answer:
                    yield found
        except InvalidRequest as error:
            if error.param == "text_input":
                error.param = "text"
            raise

    def prompt(self, request):
        if request.has("messages") and request.has("text"):
            raise InvalidRequest("messages and text are alternatives", param="text")
        if request.has("text"):
            text = request.text("text")
            if not text:
                raise InvalidRequest("text is empty", param="text")
            return {"text_input": text, "exclude_input_in_output": True}
        if not request.has("messages"):
            raise InvalidRequest("messages is required", param="messages")
        return {"messages": json.dumps(read_messages(request))}

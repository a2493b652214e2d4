"""Pipeline ``hibari``: text of any length to streamed speech, sentence by sentence."""

import json
from contextlib import aclosing

import numpy as np
from omni_runtime import seeds
from omni_runtime.errors import InvalidRequest
from omni_runtime.pipeline import Pipeline
from omni_runtime.sentences import split_sentences
from omni_runtime.speech import Speaker, SpeechParams, check_voice


class TritonPythonModel(Pipeline):
    async def run(self, request):
        params = SpeechParams.of(request)
        check_voice(params.voice, self.config.names("voices"))
        text = request.text("text")
        limit = self.config.integer("max_characters", 40_000)
        if len(text) > limit:
            raise InvalidRequest(f"text has {len(text)} characters; at most {limit} are taken", param="text")
        pieces = split_sentences(text)
        if not pieces:
            raise InvalidRequest("text is empty", param="text")
        seed = seeds.draw() if params.seed is None else params.seed

        async def sentences():
            for piece in pieces:
                yield piece

        speaker = Speaker(request, self.pools["hibari_tts"], speed=params.speed, seed=seed, metrics=self.metrics)
        read = made = 0
        async with aclosing(speaker.speak(sentences())) as speech:
            async for spoken in speech:
                read, made = read + spoken.input_tokens, made + spoken.output_tokens
                yield {
                    "audio": spoken.audio,
                    "sample_rate": np.array([spoken.sample_rate], np.int32),
                    "offset": np.array([spoken.offset], np.int64),
                    "text": spoken.text if not spoken.offset else f" {spoken.text}",
                    "seed": np.array([seed], np.int64),
                    "usage": json.dumps({"input_tokens": read, "output_tokens": made, "total_tokens": read + made}),
                }
        if not speaker.offset:
            raise InvalidRequest("text has nothing that can be spoken", param="text")

"""Pipeline ``voice_chat``: text or speech in, text and speech out; each sentence is spoken as soon as it is written."""

import asyncio
import json
from contextlib import aclosing

import numpy as np
from omni_runtime import kserve
from omni_runtime.chat import VoiceChatParams, read_messages
from omni_runtime.clips import hear, read_clips
from omni_runtime.errors import InvalidRequest
from omni_runtime.pipeline import Pipeline
from omni_runtime.sentences import SentenceSplitter
from omni_runtime.speech import Speaker, check_voice


class TritonPythonModel(Pipeline):
    async def run(self, request):
        params = VoiceChatParams.of(request)
        check_voice(params.voice, self.config.names("voices"))
        seed = params.drawn_seed()
        heard = await self.listen(request)
        first = {"seed": np.array([seed], np.int64), "input_text": heard.text, "text": "", "finish_reason": ""}
        yield first
        pieces, events = asyncio.Queue(), asyncio.Queue()
        spoken = "audio" in params.modalities
        inputs = {"messages": json.dumps(heard.messages), "params": params.sampling(seed)}
        tasks = [asyncio.create_task(forward(self.write(request, inputs, pieces), events))]
        if spoken:
            speaker = Speaker(request, self.pools["hibari_tts"], speed=params.speed, seed=seed, metrics=self.metrics)
            tasks.append(asyncio.create_task(forward(self.speak(speaker, pieces), events)))
        last = {"text": "", "finish_reason": "", "seed": first["seed"]}
        try:
            for _ in tasks:
                while (event := await events.get()) is not None:
                    if isinstance(event, Exception):
                        raise event
                    if "usage" in event:
                        last |= {name: event.pop(name) for name in ("finish_reason", "usage")}
                    yield event
        finally:
            # The writer's and the speaker's calls end with the request, however it ends.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        yield last

    async def listen(self, request):
        """The request's messages with every clip replaced by what was heard in it."""
        clips = read_clips(request, self.config.integer("max_seconds", 600))
        if request.has("messages"):
            if request.has("text"):
                raise InvalidRequest("messages and text are alternatives", param="text")
            messages = read_messages(request)
        elif clips and not request.has("text"):
            part = {"type": "input_audio", "input_audio": {"tensor": "audio", "index": 0}}
            messages = [{"role": "user", "content": [part]}]
        else:
            text = request.text("text")
            if not text.strip():
                raise InvalidRequest("text is empty", param="text")
            messages = [{"role": "user", "content": text}]
        return await hear(request, self.pools["whisper"], messages, clips)

    async def write(self, request, inputs, pieces):
        """The answer's text; every sentence that it completes goes to ``pieces``."""
        splitter = SentenceSplitter()
        wanted = ["text", "token_ids", "finish_reason", "usage"]
        async with aclosing(self.pools["smollm2"].stream(request, inputs, outputs=wanted)) as answer:
            async for found in answer:
                for piece in splitter.push(kserve.text(found, "text")):
                    pieces.put_nowait(piece)
                yield found
        for piece in splitter.close():
            pieces.put_nowait(piece)
        pieces.put_nowait(None)

    async def speak(self, speaker, pieces):
        async def written():
            while (piece := await pieces.get()) is not None:
                yield piece

        async with aclosing(speaker.speak(written())) as speech:
            async for spoken in speech:
                yield {
                    "audio": spoken.audio,
                    "sample_rate": np.array([spoken.sample_rate], np.int32),
                    "offset": np.array([spoken.offset], np.int64),
                }


async def forward(source, events):
    """Every item of ``source`` into ``events``, then None; or what it raised."""
    try:
        async with aclosing(source):
            async for item in source:
                events.put_nowait(item)
    except Exception as error:
        events.put_nowait(error)
    else:
        events.put_nowait(None)

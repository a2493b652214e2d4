"""The asyncio SDK."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from omni_runtime.errors import NotFound, OmniError
from omni_runtime.kserve import DEFAULT_TIMEOUT, Connection, Outputs

from omni_client import requests, responses
from omni_client.requests import Audio, Call, ChatSettings, Message, SpeakSettings, TranscribeSettings
from omni_client.types import ChatChunk, Model, Reply, Speech, SpeechChunk, Transcript, TranscriptChunk

Chunk = TypeVar("Chunk")
Whole = TypeVar("Whole")


def default_url() -> str:
    """The server's gRPC address: OMNI_URL, else localhost:8001."""
    return os.environ.get("OMNI_URL") or "localhost:8001"


class AsyncStream(Generic[Chunk, Whole]):
    """Chunks as they come. Leaving the loop, `aclose()`, `async with` or dropping it cancels the request."""

    def __init__(
        self,
        outputs: AsyncIterator[Outputs],
        chunk: Callable[[Outputs], Chunk],
        whole: Callable[[Outputs], Whole],
    ) -> None:
        self._outputs, self._chunk, self._whole = outputs, chunk, whole

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        return self._chunk(await anext(self._outputs))

    async def collect(self) -> Whole:
        """The result of all chunks that are still to come."""
        return self._whole(responses.together([outputs async for outputs in self._outputs]))

    async def aclose(self) -> None:
        """Cancel the request; nothing happens when it has ended."""
        await self._outputs.aclose()  # type: ignore[attr-defined]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """Speech, transcription and chat from a Triton server at `url` (default: OMNI_URL, else localhost:8001).

    Every request ends within `timeout` seconds, or its own. `model` None takes the first ready pipeline of the task.
    Errors are those of `omni_runtime.errors`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.timeout, self._headers = url or default_url(), timeout, headers
        self._connection: Connection | None = None
        self._chosen: dict[tuple[str, bool], str] = {}

    @overload
    def speak(
        self, text: str, *, model: str | None = None, stream: Literal[False] = False, timeout: float | None = None,
        **settings: Unpack[SpeakSettings],
    ) -> Coroutine[Any, Any, Speech]: ...  # fmt: skip
    @overload
    def speak(
        self, text: str, *, model: str | None = None, stream: Literal[True], timeout: float | None = None,
        **settings: Unpack[SpeakSettings],
    ) -> AsyncStream[SpeechChunk, Speech]: ...  # fmt: skip
    def speak(
        self,
        text: str,
        *,
        model: str | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **settings: Unpack[SpeakSettings],
    ) -> Coroutine[Any, Any, Speech] | AsyncStream[SpeechChunk, Speech]:
        """`text` as speech; with `stream` sentence by sentence. Settings: see SpeakSettings."""

        def build() -> Call:
            return requests.speak(text, settings, stream=stream)

        outputs = self._run(build, model, timeout)
        return self._answer(outputs, responses.speech_chunk, responses.speech, stream)

    @overload
    def transcribe(
        self, audio: Audio, sample_rate: int | None = None, *, model: str | None = None,
        stream: Literal[False] = False, timeout: float | None = None, **settings: Unpack[TranscribeSettings],
    ) -> Coroutine[Any, Any, Transcript]: ...  # fmt: skip
    @overload
    def transcribe(
        self, audio: Audio, sample_rate: int | None = None, *, model: str | None = None,
        stream: Literal[True], timeout: float | None = None, **settings: Unpack[TranscribeSettings],
    ) -> AsyncStream[TranscriptChunk, Transcript]: ...  # fmt: skip
    def transcribe(
        self,
        audio: Audio,
        sample_rate: int | None = None,
        *,
        model: str | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **settings: Unpack[TranscribeSettings],
    ) -> Coroutine[Any, Any, Transcript] | AsyncStream[TranscriptChunk, Transcript]:
        """The text of a file (path or bytes) or of samples [n] at `sample_rate` Hz; with `stream` by segments."""

        def build() -> Call:
            return requests.transcribe(audio, sample_rate, settings, stream=stream)

        outputs = self._run(build, model, timeout)
        return self._answer(outputs, responses.transcript_chunk, responses.transcript, stream)

    @overload
    def chat(
        self, messages: str | Sequence[Message] = "", *, audio: Audio | Sequence[Audio] | None = None,
        sample_rate: int | None = None, model: str | None = None, stream: Literal[False] = False,
        timeout: float | None = None, **settings: Unpack[ChatSettings],
    ) -> Coroutine[Any, Any, Reply]: ...  # fmt: skip
    @overload
    def chat(
        self, messages: str | Sequence[Message] = "", *, audio: Audio | Sequence[Audio] | None = None,
        sample_rate: int | None = None, model: str | None = None, stream: Literal[True],
        timeout: float | None = None, **settings: Unpack[ChatSettings],
    ) -> AsyncStream[ChatChunk, Reply]: ...  # fmt: skip
    def chat(
        self,
        messages: str | Sequence[Message] = "",
        *,
        audio: Audio | Sequence[Audio] | None = None,
        sample_rate: int | None = None,
        model: str | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **settings: Unpack[ChatSettings],
    ) -> Coroutine[Any, Any, Reply] | AsyncStream[ChatChunk, Reply]:
        """The reply to a text, to messages or to spoken `audio`; with `stream` as it is written and spoken."""

        def build() -> Call:
            return requests.chat(messages, audio, sample_rate, settings, stream=stream)

        outputs = self._run(build, model, timeout)
        return self._answer(outputs, responses.chat_chunk, responses.reply, stream)

    async def models(self) -> list[Model]:
        """The pipelines that the server has loaded."""
        ready = responses.loaded(await self.connection.index())
        models = []
        for name in (name for name, up in ready.items() if up):
            with suppress(NotFound):  # unloaded in between
                if model := responses.model(await self.connection.config(name), ready):
                    models.append(model)
        return models

    async def ready(self, model: str | None = None) -> bool:
        """Whether the server answers; with `model`, whether it and its stages are loaded."""
        if model is None:
            return await self.connection.live()
        try:
            return any(known.name == model and known.ready for known in await self.models())
        except OmniError:
            return False

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def connection(self) -> Connection:
        """The KServe connection underneath, made on first use: gRPC binds it to the running event loop."""
        if self._connection is None:
            self._connection = Connection(self.url, headers=self._headers)
        return self._connection

    def _answer(
        self,
        outputs: AsyncIterator[Outputs],
        chunk: Callable[[Outputs], Chunk],
        whole: Callable[[Outputs], Whole],
        stream: bool,
    ) -> Coroutine[Any, Any, Whole] | AsyncStream[Chunk, Whole]:
        answer = AsyncStream(outputs, chunk, whole)
        return answer if stream else answer.collect()

    async def _run(self, build: Callable[[], Call], model: str | None, timeout: float | None) -> AsyncIterator[Outputs]:
        # Decoding a file takes a while: the loop goes on meanwhile.
        call = await asyncio.to_thread(build)
        name = model or await self._choose(call)
        try:
            limit = self.timeout if timeout is None else timeout
            stream = self.connection.stream(name, call.inputs, timeout=limit)
            async with aclosing(stream) as answers:
                async for outputs in answers:
                    yield outputs
        except OmniError:
            self._chosen.clear()
            raise

    async def _choose(self, call: Call) -> str:
        key = (call.task, call.audio)
        if key not in self._chosen:
            self._chosen[key] = responses.choose(await self.models(), call.task, audio=call.audio)
        return self._chosen[key]

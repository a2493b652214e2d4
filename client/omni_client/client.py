"""The SDK for code without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar, Unpack, overload

from omni_runtime.errors import NotFound, OmniError
from omni_runtime.kserve import DEFAULT_TIMEOUT, Outputs
from omni_runtime.kserve_sync import SyncConnection

from omni_client import requests, responses
from omni_client.aio import default_url
from omni_client.requests import Audio, Call, ChatSettings, Message, SpeakSettings, TranscribeSettings
from omni_client.types import ChatChunk, Model, Reply, Speech, SpeechChunk, Transcript, TranscriptChunk

Chunk = TypeVar("Chunk")
Whole = TypeVar("Whole")


class Stream(Generic[Chunk, Whole]):
    """Chunks as they come. Leaving the loop, `close()`, `with` or dropping it cancels the request."""

    def __init__(
        self,
        outputs: Iterator[Outputs],
        chunk: Callable[[Outputs], Chunk],
        whole: Callable[[Outputs], Whole],
    ) -> None:
        self._outputs, self._chunk, self._whole = outputs, chunk, whole

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        return self._chunk(next(self._outputs))

    def collect(self) -> Whole:
        """The result of all chunks that are still to come."""
        return self._whole(responses.together(list(self._outputs)))

    def close(self) -> None:
        """Cancel the request; nothing happens when it has ended."""
        self._outputs.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
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
        self._connection: SyncConnection | None = None
        self._chosen: dict[tuple[str, bool], str] = {}

    @overload
    def speak(
        self, text: str, *, model: str | None = None, stream: Literal[False] = False, timeout: float | None = None,
        **settings: Unpack[SpeakSettings],
    ) -> Speech: ...  # fmt: skip
    @overload
    def speak(
        self, text: str, *, model: str | None = None, stream: Literal[True], timeout: float | None = None,
        **settings: Unpack[SpeakSettings],
    ) -> Stream[SpeechChunk, Speech]: ...  # fmt: skip
    def speak(
        self,
        text: str,
        *,
        model: str | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **settings: Unpack[SpeakSettings],
    ) -> Speech | Stream[SpeechChunk, Speech]:
        """`text` as speech; with `stream` sentence by sentence. Settings: see SpeakSettings."""

        def build() -> Call:
            return requests.speak(text, settings, stream=stream)

        outputs = self._run(build, model, timeout)
        return self._answer(outputs, responses.speech_chunk, responses.speech, stream)

    @overload
    def transcribe(
        self, audio: Audio, sample_rate: int | None = None, *, model: str | None = None,
        stream: Literal[False] = False, timeout: float | None = None, **settings: Unpack[TranscribeSettings],
    ) -> Transcript: ...  # fmt: skip
    @overload
    def transcribe(
        self, audio: Audio, sample_rate: int | None = None, *, model: str | None = None,
        stream: Literal[True], timeout: float | None = None, **settings: Unpack[TranscribeSettings],
    ) -> Stream[TranscriptChunk, Transcript]: ...  # fmt: skip
    def transcribe(
        self,
        audio: Audio,
        sample_rate: int | None = None,
        *,
        model: str | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **settings: Unpack[TranscribeSettings],
    ) -> Transcript | Stream[TranscriptChunk, Transcript]:
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
    ) -> Reply: ...  # fmt: skip
    @overload
    def chat(
        self, messages: str | Sequence[Message] = "", *, audio: Audio | Sequence[Audio] | None = None,
        sample_rate: int | None = None, model: str | None = None, stream: Literal[True],
        timeout: float | None = None, **settings: Unpack[ChatSettings],
    ) -> Stream[ChatChunk, Reply]: ...  # fmt: skip
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
    ) -> Reply | Stream[ChatChunk, Reply]:
        """The reply to a text, to messages or to spoken `audio`; with `stream` as it is written and spoken."""

        def build() -> Call:
            return requests.chat(messages, audio, sample_rate, settings, stream=stream)

        outputs = self._run(build, model, timeout)
        return self._answer(outputs, responses.chat_chunk, responses.reply, stream)

    def models(self) -> list[Model]:
        """The pipelines that the server has loaded."""
        ready = responses.loaded(self.connection.index())
        models = []
        for name in (name for name, up in ready.items() if up):
            with suppress(NotFound):  # unloaded in between
                if model := responses.model(self.connection.config(name), ready):
                    models.append(model)
        return models

    def ready(self, model: str | None = None) -> bool:
        """Whether the server answers; with `model`, whether it and its stages are loaded."""
        if model is None:
            return self.connection.live()
        try:
            return any(known.name == model and known.ready for known in self.models())
        except OmniError:
            return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connection(self) -> SyncConnection:
        """The KServe connection underneath, made on first use."""
        if self._connection is None:
            self._connection = SyncConnection(self.url, headers=self._headers)
        return self._connection

    def _answer(
        self,
        outputs: Iterator[Outputs],
        chunk: Callable[[Outputs], Chunk],
        whole: Callable[[Outputs], Whole],
        stream: bool,
    ) -> Whole | Stream[Chunk, Whole]:
        answer = Stream(outputs, chunk, whole)
        return answer if stream else answer.collect()

    def _run(self, build: Callable[[], Call], model: str | None, timeout: float | None) -> Iterator[Outputs]:
        call = build()
        name = model or self._choose(call)
        try:
            limit = self.timeout if timeout is None else timeout
            stream = self.connection.stream(name, call.inputs, timeout=limit)
            with closing(stream) as answers:
                yield from answers
        except OmniError:
            self._chosen.clear()
            raise

    def _choose(self, call: Call) -> str:
        key = (call.task, call.audio)
        if key not in self._chosen:
            self._chosen[key] = responses.choose(self.models(), call.task, audio=call.audio)
        return self._chosen[key]

from __future__ import annotations

from pathlib import Path

import pytest
from omni_client.launch.stack import levels_of
from omni_client.launch.triton import ServerOptions, TritonServer, is_loopback
from omni_client.launch.warmup import Warmup, buzz
from omni_runtime.errors import InvalidRequest, NotFound

CALLS = {
    "voice_chat": ["whisper", "smollm2", "hibari"],
    "whisper": ["silero_vad", "whisper_tiny_en"],
    "smollm2": ["smollm2_135m"],
    "hibari": ["hibari_tts"],
    "silero_vad": [],
    "whisper_tiny_en": [],
    "smollm2_135m": [],
    "hibari_tts": [],
}


def calls(name: str) -> list[str]:
    if name not in CALLS:
        raise NotFound(f"no model {name!r}")
    return CALLS[name]


def test_a_model_stands_above_all_that_it_calls() -> None:
    levels = levels_of(["hibari", "voice_chat"], calls)
    assert [set(level) for level in levels] == [
        {"hibari_tts", "silero_vad", "whisper_tiny_en", "smollm2_135m"},
        {"hibari", "whisper", "smollm2"},
        {"voice_chat"},
    ]


def test_a_stage_alone_is_a_level() -> None:
    assert levels_of(["hibari_tts"], calls) == (("hibari_tts",),)
    assert levels_of([], calls) == ()


def test_a_pipeline_that_calls_itself_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a -> b -> a"):
        levels_of(["a"], lambda name: {"a": ["b"], "b": ["a"]}[name])


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(NotFound, match="ecko"):
        levels_of(["ecko"], calls)


def server(**options: object) -> TritonServer:
    made = TritonServer(ServerOptions(Path("/bin/tritonserver"), Path("/b"), (Path("/r"),), **options))  # type: ignore[arg-type]
    made.ports = {"http": 1, "grpc": 2, "metrics": 3}
    return made


def test_on_loopback_nothing_is_restricted() -> None:
    closed = server()
    command = closed.command("omni-x-")
    assert closed.headers == {}
    assert not [word for word in command if "restricted" in word]
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"} <= set(command)
    assert "--backend-config=python,shm-region-prefix-name=omni-x-" in command


def test_an_open_server_makes_a_key_and_restricts() -> None:
    opened, another = server(host="0.0.0.0"), server(host="0.0.0.0")
    assert opened.key and opened.key != another.key
    restricted = [word for word in opened.command("p") if "restricted" in word]
    assert len(restricted) == 2
    assert all("model-repository,shared-memory,trace,logging" in word and opened.key in word for word in restricted)
    assert opened.address("grpc") == "127.0.0.1:2"


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_what_speaks_is_warmed_first() -> None:
    tasks = {"whisper": "transcription", "voice_chat": "chat", "hibari": "text_to_speech"}
    assert Warmup.order(tasks)[0] == "hibari"
    assert abs(buzz()).max() <= 1.0

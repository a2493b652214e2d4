"""The command as a person runs it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from omni_client import audio

if TYPE_CHECKING:
    from conftest import SmallServer

RATE = 16_000
WAIT = 60


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "omni_client.cli", *arguments]


def run(
    server: SmallServer | None, *arguments: str, stdin: bytes = b"", **env: str
) -> subprocess.CompletedProcess[bytes]:
    url = {"OMNI_URL": server.url if server else "localhost:1"}
    environment = {**os.environ, **url, "COLUMNS": "120", **env}
    return subprocess.run(command(*arguments), input=stdin, capture_output=True, env=environment, timeout=WAIT)


@pytest.mark.parametrize("format", ["wav", "mp3", "flac", "ogg", "aac"])
def test_say_to_a_file(server: SmallServer, tmp_path: Path, format: str) -> None:
    path = tmp_path / f"out.{format}"
    done = run(server, "say", "one two three", "-o", str(path), "--voice", "bob", "--seed", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert b"first audio" in done.stderr
    assert b"real-time factor" in done.stderr
    samples, rate = audio.decode(path)
    assert samples.size / rate == pytest.approx(0.11, abs=0.1)
    assert json.loads(server.requests[-1][1]["params"][0]) == {"voice": "bob", "seed": 5}
    assert list(tmp_path.iterdir()) == [path]


def test_say_to_standard_output_from_standard_input(server: SmallServer) -> None:
    done = run(server, "say", "-", "-o", "-", "--no-stream", stdin=b"one two")
    assert done.returncode == 0, done.stderr
    assert audio.decode(done.stdout)[0].size == 6 * 160
    done = run(server, "say", "one two", "-o", "-", "--format", "pcm")
    assert np.frombuffer(done.stdout, "<i2").size == 6 * 160


def test_say_plays(server: SmallServer, tmp_path: Path) -> None:
    without = run(server, "say", "one", PATH=str(tmp_path))
    assert without.returncode == 1
    assert b"no player was found (aplay" in without.stderr
    player = tmp_path / "aplay"
    player.write_text(f"#!/bin/sh\nexec /bin/cat > {tmp_path}/heard\n")
    player.chmod(0o755)
    done = run(server, "say", "one two", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert np.frombuffer((tmp_path / "heard").read_bytes(), "<i2").tolist() == [8192] * 960
    player.write_text("#!/bin/sh\nexit 3\n")
    broken = run(server, "say", "one two", PATH=str(tmp_path))
    assert broken.returncode == 1
    assert b"aplay ended with code 3" in broken.stderr


def test_a_failed_request_leaves_no_file(server: SmallServer, tmp_path: Path) -> None:
    done = run(server, "say", " ", "-o", str(tmp_path / "out.wav"))
    assert (done.returncode, done.stderr) == (1, b"error: text is empty\n")
    assert list(tmp_path.iterdir()) == []


def test_transcribe(server: SmallServer, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp3"
    path.write_bytes(audio.encode(np.full(RATE, 0.1, np.float32), RATE, "mp3"))
    assert run(server, "transcribe", str(path)).stdout == b"One. Two.\n"
    assert run(server, "transcribe", "-", stdin=path.read_bytes()).stdout == b"One. Two.\n"
    assert run(server, "transcribe", str(path), "--format", "srt").stdout.startswith(b"1\n00:00:00,000 --> ")
    assert run(server, "transcribe", str(path), "--format", "vtt").stdout.startswith(b"WEBVTT\n\n00:00:00.000 --> ")
    document = json.loads(run(server, "transcribe", str(path), "--format", "json", "--words").stdout)
    assert document["segments"][0]["words"][0]["word"] == " One."


def test_chat(server: SmallServer, tmp_path: Path) -> None:
    done = run(server, "chat", "hello", "--system", "be brief", "--max-tokens", "9")
    assert done.stdout == b"You said hello.\n"
    messages = json.loads(server.requests[-1][1]["messages"][0])
    assert [message["role"] for message in messages] == ["system", "user"]


def test_a_conversation_remembers(server: SmallServer) -> None:
    done = run(server, "chat", stdin=b"hello\n\nagain\n/quit\nnever\n")
    assert done.stdout == b"You said hello.\nYou said again.\n"
    messages = json.loads(server.requests[-1][1]["messages"][0])
    assert [message["content"] for message in messages] == ["hello", "You said hello.", "again"]


def test_spoken_chat(server: SmallServer, tmp_path: Path) -> None:
    clip, reply = tmp_path / "clip.wav", tmp_path / "reply.flac"
    clip.write_bytes(audio.encode(np.full(RATE, 0.1, np.float32), RATE, "wav"))
    done = run(server, "chat", "--audio", str(clip), "-o", str(reply))
    assert (done.returncode, done.stdout) == (0, b"Hm.\n")
    assert b"heard: what was heard\n" in done.stderr
    assert audio.decode(reply)[0].size == 1_600
    done = run(server, "chat", "what is it?", "--audio", str(clip))
    assert json.loads(server.requests[-1][1]["params"][0]) == {"modalities": ["text"]}
    assert done.stdout == b"Hm.\n"


def test_models_and_status(server: SmallServer) -> None:
    done = run(server, "models")
    assert [line.split()[:4] for line in done.stdout.decode().splitlines()[:2]] == [
        ["pipeline", "task", "state", "voices"],
        ["talker", "text_to_speech", "ready", "ann,"],
    ]
    done = run(server, "status")
    assert done.returncode == 0
    assert done.stdout.startswith(b"small 1.2.3 at localhost:")
    assert b"not loaded" in done.stdout
    server.down.add("talker_stage")
    assert run(server, "status").returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["say"],
        ["nonsense"],
        ["say", "x", "--nope"],
        ["transcribe", "x.wav", "--format", "doc"],
        ["chat", "-o", "x.wav"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    done = run(None, *arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["say", "x", "-o", "out.doc"], "'out.doc' ends in no format"),
        (["say", "x", "-o", "out.wav", "--format", "doc"], "'doc' is not an audio format"),
        (["transcribe", "/nowhere.wav"], "cannot read /nowhere.wav: No such file"),
        (["status"], "no server answers at localhost:1"),
        (["models"], "error: "),
        (["models", "--url", "http://localhost:1"], "is not a gRPC address"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    done = run(None, *arguments)
    assert done.returncode == 1
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_help_lists_every_command() -> None:
    done = run(None, "--help")
    assert done.returncode == 0
    for name in ("say", "transcribe", "chat", "models", "status", "serve", "frontend", "build", "plan", "backends"):
        assert f" {name} " in done.stdout.decode()
    assert run(None, "--version").stdout.strip()


def test_ctrl_c_cancels_the_request(server: SmallServer) -> None:
    environment = {**os.environ, "OMNI_URL": server.url}
    arguments = command("say", "forever", "-o", "-", "--format", "pcm")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.read(1_000)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=WAIT)
    assert (process.returncode, stderr) == (130, b"cancelled\n")
    assert server.cancelled.wait(WAIT)


def test_a_reader_that_leaves_cancels_quietly(server: SmallServer) -> None:
    environment = {**os.environ, "OMNI_URL": server.url}
    arguments = command("say", "forever", "-o", "-", "--format", "pcm")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        process.wait(WAIT)
    assert server.cancelled.wait(WAIT)


def imported(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=WAIT)
    return {name.partition(".")[0] for name in done.stdout.decode().split()}


def test_imports_stay_small() -> None:
    assert not imported("import omni_client") & {"numpy", "grpc", "av", "typer", "torch", "fastapi"}
    heavy = {"torch", "transformers", "fastapi", "uvicorn", "rich", "av", "omni_build", "onnxruntime", "scipy"}
    assert not imported("from omni_client import Client, AsyncClient") & heavy
    assert not imported("import omni_client.cli, omni_client.say, omni_client.converse") & heavy
    assert not imported("import omni_client.audio, omni_client.decoding") & (heavy - {"av"})


@pytest.mark.parametrize(
    ("missing", "arguments", "advice"),
    [
        ("typer", ["models"], b"pip install 'triton-omni[client]'"),
        ("av", ["transcribe", "x.wav"], b"pip install 'triton-omni[client]'"),
        ("omni_build.cli", ["build"], b"pip install 'triton-omni[build]'"),
    ],
)
def test_a_missing_extra_is_named(missing: str, arguments: list[str], advice: bytes) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; from omni_client.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, timeout=WAIT)
    assert done.returncode == 1
    assert advice in done.stderr
    assert done.stderr.count(b"\n") == 1

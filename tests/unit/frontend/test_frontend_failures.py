"""Replicas that die, servers that go, deadlines, clients that read slowly: one request is hit, and no other."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from omni_client.frontend import pools

SPEECH = {"model": "speaker", "input": "One.", "response_format": "pcm"}
TWO = SPEECH | {"input": "One. wait."}
EVENTS = TWO | {"stream_format": "sse"}


@contextmanager
def stub(model: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like the stub of `model`, whose server we are."""
    arguments = ["triton_python_backend_stub", "-c", "input()", str(os.getpid()), f"{model}_0_0"]
    with subprocess.Popen(arguments, executable=sys.executable, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def readiness(front: Any) -> dict[str, bool]:
    answer = await front.http.get("/health/ready")
    states = {name: state["state"] == "ready" for name, state in answer.json()["pipelines"].items()}
    assert (answer.status_code == 200) == (bool(states) and all(states.values()))
    return states


def last(answer: Any) -> dict[str, Any]:
    """The last event of a stream."""
    return dict(json.loads(answer.text.strip().rpartition("data: ")[2]))


async def until(front: Any, wanted: dict[str, bool]) -> None:
    """Returns when that is the readiness of the pipelines."""
    async with asyncio.timeout(30):
        while True:
            if await readiness(front) == wanted:
                return
            await asyncio.sleep(0.02)


async def page(front: Any) -> list[str]:
    return (await front.http.get("/metrics")).text.splitlines()


async def shown(front: Any, line: str) -> None:
    """Returns when the metrics have that line."""
    async with asyncio.timeout(30):
        while True:
            if line in await page(front):
                return
            await asyncio.sleep(0.02)


ALL = dict.fromkeys(("hearer", "speaker", "talker", "writer"), True)


async def test_a_stream_on_a_dead_replica_ends_and_others_go_on(run: Any) -> None:
    with stub("speaker") as first, stub("speaker_1") as second:
        stubs, replicas = {"speaker": first, "speaker_1": second}, {"speaker": "speaker_1"}
        async with run(stubs=stubs, replicas=replicas) as front, asyncio.timeout(60):
            streams = [asyncio.create_task(front.http.post("/v1/audio/speech", json=EVENTS)) for _ in range(4)]
            await front.triton.called(4)
            calls = list(front.triton.calls)
            assert sorted(call.model for call in calls) == ["speaker", "speaker", "speaker_1", "speaker_1"]
            await asyncio.gather(*(call.running.wait() for call in calls))
            first.kill()
            finished = asyncio.as_completed(streams)
            for _ in range(2):
                error = last(await next(finished))["error"]
                assert error["code"] == "stage_unavailable" and "speaker" in error["message"]
            for _ in range(4):
                assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200
                assert front.last().model == "speaker_1"
            assert (await readiness(front)) == ALL
            for call in calls:
                call.release.set()
            for _ in range(2):
                assert last(await next(finished))["type"] == "speech.audio.done"
            models = [model["id"] for model in (await front.http.get("/v1/models")).json()["data"]]
            assert models == ["hearer", "speaker", "talker", "writer"], "a replica is no model of its own"


async def test_without_a_replica_requests_fail_at_once_until_one_is_back(run: Any, access_log: Any) -> None:
    with stub("speaker") as first:
        async with run(stubs={"speaker": first}) as front, asyncio.timeout(60):
            broken = asyncio.create_task(front.http.post("/v1/audio/speech", json=EVENTS))
            await front.triton.called(1)
            said = {"model": "writer", "messages": [{"role": "user", "content": "wait"}]}
            other = asyncio.create_task(front.http.post("/v1/chat/completions", json=said))
            await front.triton.called(2)
            await asyncio.gather(*(call.running.wait() for call in front.triton.calls))
            first.kill()
            assert last(await broken)["error"]["code"] == "stage_unavailable"
            line = await access_log.get()
            assert line["stage"] == "speaker" and line["request_id"].startswith("req-")
            refused = await front.http.post("/v1/audio/speech", json=SPEECH)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "stage_unavailable"
            assert await readiness(front) == ALL | {"speaker": False, "talker": False}
            assert (await front.http.get("/health/live")).status_code == 200
            lines = await page(front)
            assert 'omni_frontend_pool_evictions_total{model="speaker"} 1.0' in lines
            assert 'omni_frontend_pool_replicas{model="speaker",state="out"} 1.0' in lines
            front.triton.calls[1].release.set()
            assert (await other).status_code == 200
            with stub("speaker") as second:
                front.triton.stubs = {"speaker": second}
                await until(front, ALL)
                assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200


async def test_a_dead_stage_makes_what_needs_it_unready(run: Any) -> None:
    with stub("vocoder") as vocoder:
        async with run(stubs={"vocoder": vocoder}) as front:
            await shown(front, 'omni_frontend_pool_replicas{model="vocoder",state="live"} 1.0')
            assert await readiness(front) == ALL
            vocoder.kill()
            await until(front, ALL | {"speaker": False, "talker": False})
            told = (await front.http.get("/health/ready?model=talker")).json()["pipelines"]["talker"]
            assert told == {"task": "chat", "state": "degraded", "not_ready": ["vocoder"]}
            assert (await front.http.get("/health/ready?model=writer")).status_code == 200
            with stub("vocoder") as again:
                front.triton.stubs = {"vocoder": again}
                await until(front, ALL)


async def test_a_process_that_cannot_be_watched_is_asked(run: Any, monkeypatch: Any) -> None:
    """A model on another host: its processes are not to be seen from here."""
    monkeypatch.setattr(pools, "LOOK_SECONDS", 0.05)
    with stub("another") as vocoder:
        async with run(stubs={"vocoder": vocoder}) as front:
            await shown(front, 'omni_frontend_pool_replicas{model="vocoder",state="live"} 1.0')
            vocoder.kill()
            await until(front, ALL | {"speaker": False, "talker": False})
            with stub("another") as again:
                front.triton.stubs = {"vocoder": again}
                await until(front, ALL)


async def test_an_answer_that_had_not_begun_is_503_and_made_elsewhere_where_there_is_one(run: Any) -> None:
    said = {"model": "writer", "messages": [{"role": "user", "content": "wait"}]}
    with stub("writer") as first, stub("writer_1") as second:
        stubs, replicas = {"writer": first, "writer_1": second}, {"writer": "writer_1"}
        async with run(stubs=stubs, replicas=replicas) as front, asyncio.timeout(60):
            task = asyncio.create_task(front.http.post("/v1/chat/completions", json=said))
            await front.triton.called(1)
            await front.last().running.wait()
            assert front.last().model == "writer"
            first.kill()
            await front.triton.called(2)
            await front.last().running.wait()
            assert front.last().model == "writer_1"
            second.kill()
            answer = await task
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "stage_unavailable"


async def test_a_server_that_goes_is_503_and_works_when_it_is_back(run: Any) -> None:
    async with run(refresh=0.2) as front, asyncio.timeout(60):
        broken = asyncio.create_task(front.http.post("/v1/audio/speech", json=EVENTS))
        await front.triton.called(1)
        await front.last().running.wait()
        await front.triton.server.stop(None)
        assert "error" in last(await broken)
        for _ in range(3):
            answer = await front.http.post("/v1/audio/speech", json=SPEECH)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "stage_unavailable"
        assert (await front.http.get("/health/ready")).status_code == 503
        assert (await front.http.get("/health/live")).status_code == 200
        await front.triton.restart()
        await until(front, ALL)
        assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/chat/completions", "/v1/completions"])
async def test_a_timeout_is_a_504_that_names_the_stage(front: Any, access_log: Any, path: str) -> None:
    model = "speaker" if "speech" in path else "writer"
    said = {"input": "wait. wait"} if "speech" in path else {"prompt": "wait"}
    if "chat" in path:
        said = {"messages": [{"role": "user", "content": "wait"}]}
    answer = await front.http.post(path, json={"model": model, "timeout": 0.2, **said} | (
        {"stream_format": "sse"} if "speech" in path else {}))  # fmt: skip
    if "speech" in path:
        error = last(answer)["error"]
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded" and error["message"] == f"{model}: not done within 0.2 s"
    assert 0 < front.last().parameters["timeout"] <= 200_000
    await front.last().cancelled.wait()
    assert (await access_log.get())["stage"] == model
    assert any(
        line.startswith(f'omni_frontend_deadlines_total{{route="{path}",stage="{model}"}}')
        for line in await page(front)
    )


@pytest.mark.parametrize("timeout", [0, -1, 3601, float("inf"), "5", True])
async def test_a_timeout_is_above_0_and_at_most_an_hour(front: Any, timeout: Any) -> None:
    answer = await front.http.post(
        "/v1/audio/speech", content=json.dumps(SPEECH | {"timeout": timeout}),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    assert answer.status_code == 400
    assert (await front.http.post("/v1/audio/speech", json=SPEECH | {"priority": "low"})).status_code == 400


async def test_priority_goes_to_the_pipeline(front: Any) -> None:
    await front.http.post("/v1/audio/speech", json=SPEECH | {"priority": "high"})
    assert front.last().params["priority"] == "high" and front.last().parameters["omni_priority"] == "high"
    await front.http.post("/v1/audio/speech", json=SPEECH | {"priority": "normal"})
    assert "priority" not in front.last().params and "omni_priority" not in front.last().parameters


async def test_those_who_leave_are_counted(run: Any) -> None:
    async with run() as front, asyncio.timeout(30):
        task = asyncio.create_task(front.http.post("/v1/audio/speech", json=TWO))
        await front.triton.called(1)
        await front.last().running.wait()
        assert 'omni_frontend_requests_in_flight{route="/v1/audio/speech"} 1.0' in await page(front)
        task.cancel()
        await front.last().cancelled.wait()
        await shown(front, 'omni_frontend_cancellations_total{route="/v1/audio/speech"} 1.0')
        assert 'omni_frontend_requests_in_flight{route="/v1/audio/speech"} 0.0' in await page(front)


async def test_a_slow_reader_holds_up_only_itself(run: Any) -> None:
    """What it has not read waits in the model: a window of chunks, and what the sockets hold."""
    count = 3000
    async with run() as front, asyncio.timeout(120):
        body = json.dumps(SPEECH | {"input": "flood." * count}).encode()
        head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        host, port = front.address.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            slow.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            await front.triton.called(1)
            call = front.last()
            await call.running.wait()
            assert call.sent < count / 2
            for _ in range(5):
                assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200
            assert call.sent < count / 2 and not call.ended.is_set()
            slow.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=slow)
            answer = await reader.read()
            writer.close()
            assert call.sent == count and call.ended.is_set()
        assert dechunked(answer.partition(b"\r\n\r\n")[2]) == count * 4800


def dechunked(body: bytes) -> int:
    """The bytes of a chunked body, which must be complete."""
    total = at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return total
        total, at = total + size, end + 2 + size + 2


async def test_what_supervision_counted_is_shown(front: Any, tmp_path: Any, monkeypatch: Any) -> None:
    counts = tmp_path / "counts.prom"
    monkeypatch.setenv("OMNI_SUPERVISION_METRICS", str(counts))
    await page(front)
    counts.write_text('omni_supervision_reloads_total{model="speaker",cause="ended"} 2.0\n')
    assert 'omni_supervision_reloads_total{model="speaker",cause="ended"} 2.0' in await page(front)

"""What is the same on every route: errors, ids, keys, limits, health, metrics, documentation."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import httpx
import pytest
from omni_client.frontend.context import JsonFormatter
from omni_client.frontend.server import _listen
from omni_client.frontend.settings import Settings, parse_aliases

SPEECH = {"model": "speaker", "input": "One.", "response_format": "pcm"}


def check(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    body = answer.json()
    assert answer.status_code == status and set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["code"] == code
    assert answer.headers["x-request-id"]
    return dict(body["error"])


POSTS = ["/v1/audio/speech", "/v1/chat/completions", "/v1/completions"]


async def test_every_route_answers_errors_alike(front: Any) -> None:
    check(await front.http.get("/v1/nothing"), 404, "unknown_url")
    check(await front.http.get("/v1/models/nothing"), 404, "model_not_found")
    check(await front.http.delete("/v1/models"), 405, "method_not_allowed")
    check(await front.http.get("/v1/audio/transcriptions"), 405, "method_not_allowed")
    json_type = {"content-type": "application/json"}
    for path in POSTS:
        assert check(await front.http.get(path), 405, "method_not_allowed")
        check(await front.http.post(path, content="{", headers=json_type), 400, "invalid_json")
        check(await front.http.post(path, content=b"\xff\xfe", headers=json_type), 400, "invalid_json")
        check(await front.http.post(path, content="[" * 100_000, headers=json_type), 400, "invalid_body")
        check(await front.http.post(path, content="[]", headers=json_type), 400, "invalid_body")
        check(await front.http.post(path, content="3", headers=json_type), 400, "invalid_body")
        check(await front.http.post(path), 400, "invalid_body")
        check(await front.http.post(path, content="x"), 400, "invalid_body")
        check(await front.http.post(path, json={}), 400, "missing_required_parameter")
    upload = "/v1/audio/transcriptions"
    check(await front.http.post(upload, json={"model": "hearer"}), 400, "missing_required_parameter")
    broken = {"content-type": "multipart/form-data; boundary=x"}
    check(await front.http.post(upload, content=b"nonsense", headers=broken), 400, "invalid_body")
    check(
        await front.http.post(upload, content=b"", headers={"content-type": "multipart/form-data"}), 400, "invalid_body"
    )
    text_file = {"model": (None, "hearer"), "file": (None, "not a file")}
    check(await front.http.post(upload, files=text_file), 400, "invalid_value")


async def test_request_ids_and_traces_are_handed_on(front: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-request-id": "mine-1", "traceparent": parent, "tracestate": "a=b"}
    answer = await front.http.post("/v1/audio/speech", json=SPEECH, headers=headers)
    assert answer.headers["x-request-id"] == "mine-1" == front.last().parameters["omni_request"]
    assert front.last().metadata["traceparent"] == parent and front.last().metadata["tracestate"] == "a=b"
    odd = await front.http.post(
        "/v1/audio/speech", json=SPEECH, headers={"x-request-id": "a b", "traceparent": "nonsense"}
    )
    assert odd.headers["x-request-id"].startswith("req-")
    assert "traceparent" not in front.last().metadata


async def test_the_caller_is_logged(front: Any, access_log: Any) -> None:
    given = {"user": "u1", "metadata": {"team": "a"}, "safety_identifier": "s1"}
    await front.http.post("/v1/audio/speech", json=SPEECH | given, headers={"x-request-id": "mine"})
    line = await access_log.get()
    assert line | given == line
    assert (line["request_id"], line["status"], line["model"], line["bytes"]) == ("mine", 200, "speaker", 4800)
    assert line["first_byte_ms"] > 0
    await front.http.post("/v1/audio/speech", json=SPEECH | {"voice": "nobody"})
    line = await access_log.get()
    assert line["status"] == 404 and "nobody" in line["error"]


def test_log_lines_are_json() -> None:
    record = logging.makeLogRecord({"msg": "request", "levelno": 20, "levelname": "INFO", "omni": {"user": "a\nb"}})
    line = JsonFormatter().format(record)
    assert "\n" not in line and json.loads(line)["user"] == "a\nb" and json.loads(line)["message"] == "request"


async def test_keys(run: Any) -> None:
    async with run(api_keys=("alpha", "beta")) as front:
        for headers in ({}, {"authorization": "Bearer gamma"}, {"authorization": "Basic alpha"},
                        {"authorization": b"Bearer \xff"}):  # fmt: skip
            answer = await front.http.get("/v1/models", headers=headers)
            assert check(answer, 401, "invalid_api_key")["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("alpha", "beta"):
            assert (await front.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
        assert (await front.http.get("/metrics")).status_code == 401
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await front.http.get(path)).status_code == 200
        assert (await front.openai.models.list()).data


async def test_cors(run: Any) -> None:
    async with run(cors_origins=("https://a.example",), api_keys=("k",)) as front:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        asked = await front.http.options("/v1/audio/speech", headers=headers)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "https://a.example"
        refused = await front.http.options("/v1/audio/speech", headers=headers | {"origin": "https://b.example"})
        assert refused.status_code == 400


async def test_a_body_above_the_limit_is_refused_early(run: Any) -> None:
    async with run(max_body_bytes=10_000) as front:
        large = json.dumps(SPEECH | {"input": "a" * 20_000})
        check(await front.http.post("/v1/audio/speech", content=large), 413, "body_too_large")

        async def parts() -> Any:
            for _ in range(2000):
                yield b" " * 1000

        check(await front.http.post("/v1/audio/speech", content=parts()), 413, "body_too_large")
        # A client that would send for ever has its answer while it sends.
        reader, writer = await asyncio.open_connection(*front.address.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(11):
            writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()
        assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200


async def test_bodies_share_a_limit(run: Any, access_log: Any) -> None:
    waiting = {"model": "writer", "messages": [{"role": "user", "content": "wait" + " " * 5000}]}
    async with run(max_held_bytes=8_000) as front, asyncio.timeout(30):
        task = asyncio.create_task(front.http.post("/v1/chat/completions", json=waiting))
        await front.triton.called(1)
        busy = await front.http.post("/v1/chat/completions", json=waiting)
        assert check(busy, 429, "overloaded")["type"] == "rate_limit_error" and busy.headers["retry-after"] == "1"
        assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200
        task.cancel()
        while (await access_log.get())["complete"]:
            pass
        large = SPEECH | {"input": "One." + " " * 5000}
        assert (await front.http.post("/v1/audio/speech", json=large)).status_code == 200


async def test_a_body_that_does_not_arrive_is_given_up(run: Any) -> None:
    async with run(body_timeout=0.2) as front:
        reader, writer = await asyncio.open_connection(*front.address.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer


async def test_a_client_that_does_not_read_is_given_up(run: Any, access_log: Any) -> None:
    async with run(write_timeout=0.2) as front, asyncio.timeout(60):
        body = json.dumps(SPEECH | {"input": "One." * 5000}).encode()
        head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        host, port = front.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as deaf:
            await asyncio.to_thread(deaf.sendall, head.encode() + b"content-type: application/json\r\n\r\n" + body)
            line = await access_log.get()
            assert line["complete"] is False and "read nothing" in line["error"]
            await front.last().cancelled.wait()
        assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200


async def test_thousands_of_connections_get_200_or_429(run: Any) -> None:
    """All are open at once, more than the limit run at once, and each gets its answer."""
    limit, count = 64, 2000
    async with run(max_connections=limit) as front:
        host, port = front.address.removeprefix("http://").split(":")
        body = json.dumps(SPEECH).encode()
        head = "POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        request = head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body

        async def ask() -> tuple[int, bytes]:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            answer = await reader.read()
            writer.close()
            return int(answer.split(b" ", 2)[1]), answer

        async with asyncio.timeout(120):
            answers = await asyncio.gather(*(ask() for _ in range(count)))
        statuses = [status for status, _ in answers]
        assert set(statuses) <= {200, 429} and 200 in statuses
        assert all(b"retry-after: 1" in answer for status, answer in answers if status == 429)
        assert statuses.count(200) == len(front.triton.calls)
        assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200


async def test_the_limit_counts_what_runs(run: Any) -> None:
    waiting = {"model": "writer", "messages": [{"role": "user", "content": "wait"}]}
    async with run(max_connections=2) as front, asyncio.timeout(30):
        tasks = [asyncio.create_task(front.http.post("/v1/chat/completions", json=waiting)) for _ in range(2)]
        await front.triton.called(2)
        busy = await front.http.post("/v1/audio/speech", json=SPEECH)
        assert check(busy, 429, "overloaded")["type"] == "rate_limit_error" and busy.headers["retry-after"] == "1"
        assert (await front.http.get("/health/ready")).status_code == 200
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in front.triton.calls:
            await call.cancelled.wait()
        assert (await front.http.post("/v1/audio/speech", json=SPEECH)).status_code == 200


async def test_models_and_voices(front: Any) -> None:
    listed = (await front.openai.models.list()).data
    assert [model.id for model in listed] == ["hearer", "speaker", "talker", "writer", "tts-1"]
    alias = await front.openai.models.retrieve("tts-1")
    assert (alias.id, alias.owned_by, alias.model_extra["root"]) == ("tts-1", "triton-omni", "speaker")
    voices = (await front.http.get("/v1/audio/voices")).json()
    assert voices["voices"] == ["heart", "bella"]
    assert [(voice["model"], voice["id"], voice["default"]) for voice in voices["data"]] == [
        ("speaker", "heart", True), ("speaker", "bella", False), ("talker", "heart", True),
    ]  # fmt: skip


async def test_readiness_is_per_pipeline_and_counts_stages(run: Any) -> None:
    async with run(aliases={"tts-1": "speaker"}) as front:
        good = await front.http.get("/health/ready")
        assert good.status_code == 200 and set(good.json()["pipelines"]) == {"hearer", "speaker", "talker", "writer"}
        front.triton.unready = {"vocoder"}
        bad = await front.http.get("/health/ready")
        assert bad.status_code == 503 and bad.json()["pipelines"]["speaker"]["not_ready"] == ["vocoder"]
        assert bad.json()["pipelines"]["talker"]["state"] == "degraded"
        assert (await front.http.get("/health/ready?model=hearer")).status_code == 200
        assert (await front.http.get("/health/ready?model=tts-1")).status_code == 503
        check(await front.http.get("/health/ready?model=nothing"), 404, "model_not_found")
        front.triton.unready = {"speaker"}
        gone = await front.http.get("/health/ready?model=speaker")
        assert gone.json()["pipelines"]["speaker"]["state"] == "unavailable"
        assert (
            check(await front.http.post("/v1/audio/speech", json=SPEECH), 503, "stage_unavailable")["param"] == "model"
        )


async def test_without_a_triton(run: Any) -> None:
    async with run() as front:
        await front.triton.server.stop(None)
        assert (await front.http.get("/health")).json() == {"status": "ok"}
        assert (await front.http.get("/health/live")).status_code == 200
        assert (await front.http.get("/health/ready")).status_code == 503
        check(await front.http.post("/v1/audio/speech", json=SPEECH), 503, "stage_unavailable")
        check(await front.http.get("/v1/models"), 503, "stage_unavailable")
        assert (await front.http.get("/version")).json()["triton"] is None


async def test_metrics_are_joined_with_tritons(run: Any) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n# TYPE nv_x counter\nnv_x 5\n")
        await writer.drain()
        writer.close()

    theirs = await asyncio.start_server(page, "127.0.0.1", 0)
    port = theirs.sockets[0].getsockname()[1]
    async with theirs, run(triton_metrics=f"127.0.0.1:{port}") as front:
        await front.http.post("/v1/audio/speech", json=SPEECH)
        await front.http.get("/v1/nothing/at/all")
        text = (await front.http.get("/metrics")).text
    assert "nv_x 5" in text and "omni_frontend_triton_metrics_up 1.0" in text
    assert 'omni_frontend_requests_total{model="speaker",route="/v1/audio/speech",status="200"} 1.0' in text
    assert 'omni_frontend_first_byte_seconds_count{model="speaker",route="/v1/audio/speech"} 1.0' in text
    assert "at/all" not in text


async def test_metrics_without_tritons(front: Any) -> None:
    answer = await front.http.get("/metrics")
    assert answer.status_code == 200 and "omni_frontend_triton_metrics_up 0.0" in answer.text


async def test_version_and_documentation(front: Any) -> None:
    version = (await front.http.get("/version")).json()
    assert version["version"] and version["triton"] == {"name": "triton", "version": "0.0.0-scripted"}
    assert (await front.http.get("/docs")).status_code == 200
    schema = (await front.http.get("/openapi.json")).json()
    assert set(POSTS) < set(schema["paths"])
    assert "stop" in schema["components"]["schemas"]["ChatRequest"]["properties"]


def test_small_chunks_leave_at_once_and_unread_ones_end() -> None:
    """asyncio turns Nagle's algorithm off only on sockets that name their protocol; accepted ones take it over."""
    with _listen("127.0.0.1", 0, 5.0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000


async def test_a_taken_port_is_an_error(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        async with run(port=taken.getsockname()[1]):
            pass


@pytest.mark.parametrize(
    "change",
    [{"triton": "nowhere"}, {"port": -1}, {"max_connections": 0}, {"max_audio_seconds": float("nan")},
     {"api_keys": ("",)}],
)  # fmt: skip
def test_settings_check_themselves(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Settings(**change)


def test_aliases() -> None:
    assert parse_aliases(["tts-1=hibari", "a/b=c"]) == {"tts-1": "hibari", "a/b": "c"}
    with pytest.raises(ValueError, match="NAME=PIPELINE"):
        parse_aliases(["tts-1"])

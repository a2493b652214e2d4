"""Models, voices, health, metrics, documentation and limits of the running stack."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from omni_runtime.kserve import Connection, text


@pytest.fixture
def http(stack: Any) -> Any:
    with httpx.Client(base_url=stack.root_url, timeout=120, trust_env=False) as http:
        yield http


def test_models_and_voices(stack: Any, http: httpx.Client) -> None:
    with openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0) as client:
        tasks = {model.id: model.model_extra["task"] for model in client.models.list()}
        assert {"hibari": "text_to_speech", "whisper": "transcription", "smollm2": "chat"}.items() <= tasks.items()
        assert client.models.retrieve("hibari").id == "hibari"
        with pytest.raises(openai.NotFoundError, match="hibari"):
            client.models.retrieve("nothing")
    assert "heart" in http.get("/v1/audio/voices").json()["voices"]


def test_health_version_and_documentation(http: httpx.Client) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/health/ready?model=hibari", "/docs", "/openapi.json"):
        assert http.get(path).status_code == 200, path
    pipelines = http.get("/health/ready").json()["pipelines"]
    assert all(state["state"] == "ready" for state in pipelines.values()) and "voice_chat" in pipelines
    assert http.get("/health/ready?model=nothing").status_code == 404
    assert http.get("/version").json()["triton"]["name"] == "triton"


def test_metrics_are_joined(http: httpx.Client) -> None:
    http.post("/v1/audio/speech", json={"model": "hibari", "input": "Hello."})
    text = http.get("/metrics").text
    assert "nv_inference_request_success" in text and "omni_frontend_requests_total" in text


def test_every_error_has_one_shape(http: httpx.Client) -> None:
    answers = [
        http.get("/v1/nothing"), http.get("/v1/audio/speech"), http.post("/v1/audio/speech", content="{"),
        http.post("/v1/chat/completions", json={}), http.get("/v1/models/nothing"),
        http.post("/v1/audio/speech", content=b" " * (26 << 20)),
    ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [404, 405, 400, 400, 404, 413]
    for answer in answers:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_thousands_of_connections_get_200_or_429(stack: Any) -> None:
    host, _, port = stack.root_url.removeprefix("http://").rpartition(":")
    body = json.dumps({"model": "hibari", "input": "Hi.", "response_format": "pcm"}).encode()
    head = "POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body

    async def ask() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1])

    async with asyncio.timeout(240):
        statuses = await asyncio.gather(*(ask() for _ in range(2000)))
    assert set(statuses) <= {200, 429} and 200 in statuses
    async with httpx.AsyncClient(base_url=stack.root_url, timeout=60, trust_env=False) as http:
        assert (
            await http.post("/v1/audio/speech", content=body, headers={"content-type": "application/json"})
        ).is_success


async def running(stack: Any, count: int) -> None:
    """Returns once the pipeline itself says that it works on so many requests."""
    connection = Connection(stack.grpc_url)
    try:
        async with asyncio.timeout(60):
            state = {"running": -1}
            while state["running"] != count:
                async for outputs in connection.stream("smollm2", {"control": "status"}, outputs=["status"]):
                    state = json.loads(text(outputs, "status"))
    finally:
        await connection.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_work(stack: Any, stream: bool) -> None:
    story = [{"role": "user", "content": "Tell a very long story."}]
    body = {"model": "smollm2", "messages": story, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(base_url=stack.root_url, timeout=120, trust_env=False) as http:

        async def leave() -> None:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    pass

        tasks = [asyncio.create_task(leave()) for _ in range(8)]
        await running(stack, 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await running(stack, 0)
        answer = await http.post("/v1/chat/completions", json=body | {"stream": False, "max_tokens": 2})
        assert answer.json()["choices"][0]["finish_reason"] == "length"

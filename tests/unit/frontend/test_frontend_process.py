"""`triton-omni frontend` as a process: what it prints, how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

COMMAND = Path(sys.executable).parent / "triton-omni"
SPEECH = {"model": "speaker", "input": "One. wait.", "response_format": "pcm"}


@asynccontextmanager
async def started(*arguments: str, **environment: str) -> AsyncIterator[tuple[Any, str]]:
    process = await asyncio.create_subprocess_exec(
        COMMAND, "frontend", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env=dict(os.environ) | environment,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        yield process, line.removeprefix("ready ").strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
async def test_it_finishes_what_runs_and_ends_with_status_0(triton: Any, kind: signal.Signals) -> None:
    async with (
        started("--triton", triton.address, "--port", "0", "--alias", "tts-1=speaker") as (process, address),
        httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as http,
        asyncio.timeout(60),
    ):
        async with http.stream("POST", "/v1/audio/speech", json=SPEECH | {"model": "tts-1"}) as answer:
            chunks = answer.aiter_raw()
            assert len(await anext(chunks)) == 4800
            process.send_signal(kind)
            with pytest.raises(httpx.ConnectError):
                while True:
                    async with httpx.AsyncClient(trust_env=False) as other:
                        await other.get(f"{address}/health")
            await triton.called(1)
            triton.calls[0].release.set()
            assert sum([len(chunk) async for chunk in chunks]) == 4800
        assert await process.wait() == 0


async def test_a_second_signal_does_not_wait(triton: Any) -> None:
    async with (
        started("--triton", triton.address, "--port", "0") as (process, address),
        httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as http,
        asyncio.timeout(60),
    ):
        async with http.stream("POST", "/v1/audio/speech", json=SPEECH) as answer:
            await anext(answer.aiter_raw())
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            await process.wait()
        await triton.calls[0].cancelled.wait()


async def test_keys_from_the_environment(triton: Any) -> None:
    async with (
        started("--triton", triton.address, "--port", "0", OMNI_API_KEY="alpha", OMNI_TRITON_KEY="k") as (_, address),
        httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as http,
    ):
        assert (await http.get("/v1/models")).status_code == 401
        headers = {"authorization": "Bearer alpha"}
        assert (
            await http.post("/v1/audio/speech", json=SPEECH | {"input": "One."}, headers=headers)
        ).status_code == 200
    assert triton.calls[0].metadata["triton-grpc-protocol-omni-key"] == "k"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--triton", "nowhere"], "HOST:PORT"), (["--alias", "x"], "NAME=PIPELINE"),
     (["--log-format", "xml"], "json or text"), (["--max-connections", "0"], "max_connections")],
)  # fmt: skip
async def test_bad_flags_are_named(arguments: list[str], named: str) -> None:
    process = await asyncio.create_subprocess_exec(
        COMMAND, "frontend", *arguments, stderr=asyncio.subprocess.PIPE, env=dict(os.environ) | {"COLUMNS": "200"}
    )
    _, told = await process.communicate()
    assert process.returncode == 2 and named in told.decode()

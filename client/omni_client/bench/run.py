"""One run of the benchmark: a stack of its own, every part in turn, a table at the end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import sysconfig
from datetime import UTC, datetime
from pathlib import Path

import httpx
from omni_build import paths
from omni_runtime.kserve import Connection

from omni_client.bench import chat, speech, voice
from omni_client.bench.figures import Figure, as_json, machine, table

PIPELINES = ("hibari", "whisper", "smollm2", "voice_chat")


async def measure(addresses: dict[str, str], rounds: int, parts: tuple[str, ...]) -> list[Figure]:
    """Every part's figures, against the stack at ``addresses``."""
    connection = Connection(addresses["grpc"])
    figures: list[Figure] = []
    try:
        if "speech" in parts:
            weights = paths.model_repository() / "hibari_tts" / "1" / "hibari.onnx"
            async with httpx.AsyncClient(base_url=addresses["openai"], timeout=120) as client:
                figures += await speech.measure(connection, client, weights, rounds)
        if "chat" in parts:
            stage = paths.model_repository() / "smollm2_135m" / "1"
            figures += await chat.measure(connection, stage, rounds)
        if "voice" in parts:
            figures += await voice.measure(connection, rounds)
    finally:
        await connection.close()
    return figures


def main(rounds: int, out: Path, parts: tuple[str, ...]) -> int:
    """Serve, measure, print; 0 whether or not the aims are met, since a figure is a finding."""
    out.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sysconfig.get_path("scripts")) / "triton-omni"), "serve", *PIPELINES]
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    server = subprocess.Popen([*command, *ports, f"--log-dir={out}"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        ready = next((line for line in server.stdout if line.startswith("ready ")), "")
        if not ready:
            print("triton-omni: the stack did not start", file=sys.stderr)
            return 1
        addresses = dict(re.findall(r"(\w+)=(\S+)", ready))
        figures = asyncio.run(measure(addresses, rounds, parts))
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    report = {"date": when, "machine": machine(), "rounds": rounds, "figures": as_json(figures)}
    (out / "bench.json").write_text(json.dumps(report, indent=1))
    print(f"{when}, {machine()}\n\n{table(figures)}\n\nalso in {out / 'bench.json'}")
    return 0

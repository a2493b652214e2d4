"""What callers of the OpenAI routes see when a process behind them dies, and what is left when they leave."""

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections import Counter

import httpx
import psutil
import pytest
from omni_runtime import stubs

from tests.conftest import serving
from tests.fault.conftest import connected, idle, status, until

SPEECH = {"model": "hibari", "input": "Yes.", "seed": 1, "response_format": "pcm"}
LONG = SPEECH | {"input": " ".join(f"This is sentence number {number}." for number in range(12))}
MANY = " ".join(f"This is sentence number {number}." for number in range(300))
EVENTS = LONG | {"stream_format": "sse"}
PATH = "/v1/audio/speech"
END_SECONDS = 10


@pytest.fixture(scope="module")
def edge(built, tmp_path_factory):
    """`serve hibari`, which looks after its processes."""
    if built is None:
        pytest.skip("this needs a stack of its own")
    with serving(["hibari"], tmp_path_factory.mktemp("edge"), "--repository", str(built)) as addresses:
        yield addresses


@pytest.fixture
async def http(edge):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=edge.root_url, timeout=120, trust_env=False, limits=limits) as client:
        await until(lambda: speaks(client))
        yield client


async def speaks(http):
    return (await http.post(PATH, json=SPEECH)).status_code == 200


async def ready(http):
    return (await http.get("/health/ready")).status_code == 200


async def server_pid(edge):
    async with connected(edge) as connection:
        return stubs.server_of((await status(connection, "hibari"))["pid"])


class Listener:
    """A caller that reads an event stream; ``begun`` is set by its first event."""

    def __init__(self, http, body):
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._listen(http, body))

    async def _listen(self, http, body):
        events = []
        async with http.stream("POST", PATH, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                    self.begun.set()
        return events

    async def last(self):
        return (await self.task)[-1]


async def lose(http, edge, pid, stage):
    """Kill ``pid`` while somebody listens; what that caller, and those who come later, must see."""
    listener = Listener(http, EVENTS)
    await listener.begun.wait()
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    async with asyncio.timeout(END_SECONDS):
        last = await listener.last()
    print(f"{stage}: the stream ended {time.monotonic() - killed:.2f} s after the kill: {last['error']['message']}")
    assert last["error"]["code"] == "stage_unavailable" and stage in last["error"]["message"]
    assert (await http.get("/health/live")).status_code == 200

    answers = Counter()

    async def back():
        asked = time.monotonic()
        answer = await http.post(PATH, json=SPEECH)
        answers[answer.status_code] += 1
        assert answer.status_code in (200, 503)
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "stage_unavailable"
            assert time.monotonic() - asked < END_SECONDS
        return answer.status_code == 200

    await until(back)
    print(f"{stage}: it serves again {time.monotonic() - killed:.2f} s after the kill; meanwhile {dict(answers)}")
    await until(lambda: ready(http))
    assert (await http.get("/health/live")).status_code == 200


async def test_a_pipelines_dead_process_ends_its_streams_and_comes_back(edge, http):
    await lose(http, edge, stubs.stub_pids(await server_pid(edge), "hibari")[0], "hibari")


async def test_a_dead_stage_ends_what_needs_it_and_comes_back(edge, http):
    await lose(http, edge, stubs.stub_pids(await server_pid(edge), "hibari_tts")[0], "hibari_tts")


async def test_a_dead_server_is_503_until_it_is_back(edge, http):
    await lose(http, edge, await server_pid(edge), "hibari")


@pytest.mark.parametrize("model", ["hibari_tts", "hibari"])
async def test_readiness_follows_the_processes(edge, http, model):
    await until(lambda: ready(http))
    os.kill(stubs.stub_pids(await server_pid(edge), model)[0], signal.SIGKILL)
    killed = time.monotonic()
    async with asyncio.timeout(END_SECONDS):
        while True:
            answer = await http.get("/health/ready")
            assert (await http.get("/health/live")).status_code == 200
            if answer.status_code == 503:
                break
    told = answer.json()["pipelines"].get("hibari", {})
    print(f"{model}: unready {time.monotonic() - killed:.2f} s after the kill: {told}")
    assert not told or model in told["not_ready"]
    await until(lambda: ready(http))
    print(f"{model}: ready again {time.monotonic() - killed:.2f} s after the kill")


async def test_a_timeout_ends_the_work(edge, http):
    listener = Listener(http, EVENTS | {"input": MANY, "timeout": 0.5})
    last = await listener.last()
    assert last["error"]["code"] == "deadline_exceeded" and last["error"]["message"].startswith("hibari")
    async with connected(edge) as connection:
        await until(lambda: idle(connection, "hibari"))


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
async def test_callers_who_leave_leave_nothing_behind(edge, http, count):
    draw = random.Random(count)
    places = asyncio.Semaphore(8)
    seen = Counter()

    async def leave():
        async with places:
            body = draw.choice([LONG, EVENTS, SPEECH])
            try:
                async with asyncio.timeout(draw.expovariate(1 / 0.3)):
                    async with http.stream("POST", PATH, json=body) as answer:
                        async for _ in answer.aiter_raw():
                            pass
                        seen[answer.status_code] += 1
            except TimeoutError:
                seen["left"] += 1

    await asyncio.gather(*(leave() for _ in range(count)))
    print(dict(seen))
    assert set(seen) <= {"left", 200, 429} and seen["left"] > count / 4
    async with connected(edge) as connection:
        await until(lambda: idle(connection, "hibari"))
        stage = json.loads((await connection.infer("hibari_tts", {"control": "status"}))["status"][0])
        assert stage["running"] == 0

    async def drained():
        page = (await http.get("/metrics")).text
        return f'omni_frontend_requests_in_flight{{route="{PATH}"}} 0.0' in page

    await until(drained)
    assert (await http.post(PATH, json=SPEECH)).status_code == 200


def resident(pid):
    """MiB of a process and all its children."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(each.memory_info().rss for each in family) / 2**20


async def test_a_slow_reader_holds_up_only_itself(edge, http):
    body = LONG | {"input": MANY}
    whole = (await http.post(PATH, json=body)).content
    before = resident(edge.pid)
    host, port = edge.root_url.removeprefix("http://").split(":")
    sent = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(sent)}\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        await asyncio.to_thread(slow.sendall, head.encode() + b"content-type: application/json\r\n\r\n" + sent)
        first = await asyncio.to_thread(slow.recv, 1024)
        for _ in range(10):
            assert (await http.post(PATH, json=SPEECH)).status_code == 200
        grown = resident(edge.pid) - before
        print(f"{len(whole)} bytes; with a slow reader all processes grew by {grown:.0f} MiB")
        assert grown < 256
        async with connected(edge) as connection:
            assert (await status(connection, "hibari"))["running"] == 1
        slow.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=slow)
        answer = first + await reader.read()
        writer.close()
    header, _, chunked = answer.partition(b"\r\n\r\n")
    assert header.startswith(b"HTTP/1.1 200") and dechunked(chunked) == whole


def dechunked(body):
    """A chunked body, which must be complete."""
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2

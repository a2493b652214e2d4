"""More than is taken: every caller gets an answer soon, and service is normal right after."""

import asyncio
import time

import psutil
import pytest
from omni_runtime import stubs

from tests.fault.conftest import ask, chatting, connected, idle_everywhere, speaking, status, tritonserver, until

MODELS = ["smollm2_135m", "smollm2", "hibari_tts", "hibari"]


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory):
    """Small limits: four run and four wait in each pipeline."""
    folder = repository()
    for pipeline in ("smollm2", "hibari"):
        config = folder / pipeline / "config.pbtxt"
        written = config.read_text()
        config.unlink()
        for name in ("max_running", "max_waiting"):
            before, _, rest = written.partition(f'parameters {{ key: "{name}" value {{ string_value: "')
            written = f'{before}parameters {{ key: "{name}" value {{ string_value: "4" }} }}{rest.partition("} }")[2]}'
        config.write_text(written)
    with tritonserver(tmp_path_factory.mktemp("overload"), MODELS, folder) as server:
        yield server


async def overload(server, seconds):
    """Ten times as many callers as are taken, for ``seconds``, each asking again as soon as it is answered."""
    async with connected(server) as connection:
        alone = await ask(connection, "smollm2", chatting(1, tokens=8))
        assert alone.kind == "success"
        limit, outcomes = time.monotonic() + seconds, []

        async def caller(number):
            while time.monotonic() < limit:
                model, inputs = ("smollm2", chatting(number, tokens=8)) if number % 2 else ("hibari", speaking(number))
                outcomes.append(await ask(connection, model, inputs, parameters={"timeout": 30_000_000}))
                if outcomes[-1].kind == "Overloaded":
                    assert outcomes[-1].error.retry_after >= 1
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(caller(number) for number in range(160)))
        kinds = {kind: sum(each.kind == kind for each in outcomes) for kind in {each.kind for each in outcomes}}
        print("answers:", kinds)
        assert set(kinds) <= {"success", "Overloaded", "DeadlineExceeded"}
        assert kinds["success"] > 0
        assert kinds["Overloaded"] > 0
        await idle_everywhere(connection, ["smollm2_135m", "smollm2", "hibari"])
        after = await ask(connection, "smollm2", chatting(1, tokens=8))
        assert (after.kind, after.text) == ("success", alone.text)


async def test_ten_times_too_many_callers(server):
    await overload(server, 4)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_ten_times_too_many_callers_for_a_minute_and_no_memory(server):
    pids = [server.pid, *(pid for model in MODELS for pid in stubs.stub_pids(server.pid, model))]
    await overload(server, 10)
    before = {pid: psutil.Process(pid).memory_info().rss for pid in pids}
    await overload(server, 60)
    growth = {pid: psutil.Process(pid).memory_info().rss - before[pid] for pid in pids}
    print("growth, MiB:", {pid: value >> 20 for pid, value in growth.items()})
    assert max(growth.values()) < 64 << 20


async def test_high_priority_goes_before_those_who_wait(server):
    """Four run; of those who wait, the one that came last and is urgent runs first."""
    async with connected(server) as connection:
        order = []

        async def caller(name, inputs):
            begun = asyncio.Event()
            task = asyncio.create_task(ask(connection, "smollm2", inputs, begun))
            await asyncio.wait([task, asyncio.create_task(begun.wait())], return_when="FIRST_COMPLETED")
            order.append(name)
            return await task

        running = [asyncio.create_task(caller("running", chatting(seed, tokens=60))) for seed in range(4)]
        await counted(connection, "running", 4)
        waiting = [asyncio.create_task(caller("normal", chatting(seed, tokens=4))) for seed in range(3)]
        await counted(connection, "waiting", 3)
        urgent = asyncio.create_task(caller("high", chatting(9, tokens=4, priority="high")))
        await asyncio.gather(*running, *waiting, urgent)
        assert next(name for name in order if name != "running") == "high"


async def counted(connection, state, count):
    async def reached():
        return (await status(connection, "smollm2"))[state] == count

    await until(reached)


async def test_a_slow_reader_holds_up_its_own_request_and_no_other(server):
    """With a window, what a reader has not taken is not made: the stage stands still instead of filling the server."""
    async with connected(server) as connection:
        inputs, at_first = speaking(1, sentences=200), await synthesised(connection)
        stream = connection.stream("hibari", inputs, request_id="slow", window=8)
        taken = [await anext(stream) for _ in range(3)]

        async def stands_still():
            before = await synthesised(connection)
            await asyncio.sleep(0.5)
            return await synthesised(connection) == before

        await until(stands_still)
        assert await synthesised(connection) - at_first < 60
        others = await asyncio.gather(*(ask(connection, "hibari", speaking(seed)) for seed in range(3)))
        assert {each.kind for each in others} == {"success"}
        taken += [chunk async for chunk in stream]
        assert len(taken) == 200
        offsets = [int(chunk["offset"][0]) for chunk in taken]
        lengths = [len(chunk["audio"]) for chunk in taken]
        assert offsets == [sum(lengths[:index]) for index in range(200)]


async def synthesised(connection):
    """Sentences that the synthesiser has made so far."""
    return int((await connection.statistics("hibari_tts")).get("inference_count", 0))

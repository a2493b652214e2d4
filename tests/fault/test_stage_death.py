"""A stage that dies ends the requests that depend on it, and nothing else."""

import asyncio
import json
import os
import signal

import numpy as np
import pytest
from omni_runtime import stubs

from tests.fault.conftest import (
    ask,
    chatting,
    connected,
    idle,
    kill,
    replicate,
    serves,
    speaking,
    tritonserver,
    until,
)

STREAMS = 32
CHAT = ["smollm2_135m", "smollm2"]
SPEECH = ["hibari_tts", "hibari"]


@pytest.fixture(scope="module")
def two(repository, tmp_path_factory):
    """Two replicas of the language model and of the synthesiser."""
    folder = repository()
    names = [*replicate(folder, "smollm2_135m"), *replicate(folder, "hibari_tts")]
    with tritonserver(tmp_path_factory.mktemp("two"), [*names, *CHAT, *SPEECH], folder) as server:
        yield server


@pytest.fixture(scope="module")
def one(repository, tmp_path_factory):
    """One of each, and a pipeline that chains them."""
    models = ["silero_vad", "whisper_tiny_en", *CHAT, *SPEECH, "whisper", "voice_chat"]
    with tritonserver(tmp_path_factory.mktemp("one"), models, repository()) as server:
        yield server


async def chat_together(connection):
    """The streams, once each of them has begun."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(ask(connection, "smollm2", chatting(seed), begun[seed])) for seed in range(STREAMS)]
    return tasks, begun


async def lose_one_replica(server, victim):
    async with connected(server) as connection:
        undisturbed = await asyncio.gather(*(await chat_together(connection))[0])
        assert {each.kind for each in undisturbed} == {"success"}
        tasks, begun = await chat_together(connection)
        # Sixteen run at once, eight on each replica: of twelve that have begun, four at least are the victim's.
        await until(lambda: asyncio.sleep(0, sum(event.is_set() for event in begun) >= 12))
        before = set(stubs.stub_pids(server.pid, victim))
        kill(server, victim)
        killed = asyncio.get_running_loop().time()
        ended = {}
        for task in tasks:
            task.add_done_callback(lambda done: ended.setdefault(done, asyncio.get_running_loop().time() - killed))
        outcomes = await asyncio.gather(*tasks)
        failed = [index for index, each in enumerate(outcomes) if each.error]
        # Those on the dead replica fail, unless they had delivered nothing: such are done again on the other one.
        assert 0 < len(failed) <= STREAMS // 2
        for index, each in enumerate(outcomes):
            if each.error:
                assert (each.kind, each.error.stage) == ("StageUnavailable", victim)
                assert each.chunks
                assert undisturbed[index].text.startswith(each.text)
                assert ended[tasks[index]] < 3
            else:
                assert each.text == undisturbed[index].text
        after = await asyncio.gather(*(ask(connection, "smollm2", chatting(seed)) for seed in range(8)))
        assert {each.kind for each in after} == {"success"}

        async def back():
            pids = set(stubs.stub_pids(server.pid, victim))
            return pids and not pids & before and await connection.ready(victim)

        await until(back, 60)
        await serves(connection, victim, {"text_input": "Yes", "sampling_parameters": '{"max_tokens": 1}'})


async def test_a_dead_replica_ends_its_own_streams_and_no_other(two):
    await lose_one_replica(two, "smollm2_135m")


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_three_times_in_a_row(two):
    for number in range(3):
        await lose_one_replica(two, ("smollm2_135m", "smollm2_135m_1")[number % 2])


@pytest.mark.parametrize("victim", ["hibari_tts", "hibari_tts_1"])
async def test_one_shot_calls_are_made_elsewhere_and_nobody_notices(two, victim):
    async with connected(two) as connection:
        undisturbed = await asyncio.gather(*(ask(connection, "hibari", speaking(seed)) for seed in range(8)))
        tasks = [asyncio.create_task(ask(connection, "hibari", speaking(seed % 8))) for seed in range(64)]
        await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        kill(two, victim)
        outcomes = await asyncio.gather(*tasks)
        assert {each.kind for each in outcomes} == {"success"}
        for seed, each in enumerate(outcomes):
            for chunk, expected in zip(each.chunks, undisturbed[seed % 8].chunks, strict=True):
                np.testing.assert_allclose(chunk["audio"], expected["audio"], rtol=0, atol=1e-5)

        async def whole():
            return len(stubs.stub_pids(two.pid, victim)) == 2 and await connection.ready(victim)

        await until(whole, 60)


async def test_death_during_submission_loses_nothing(two):
    """Requests keep coming while the replica dies: those that hit it before it is known to be dead go elsewhere."""
    async with connected(two) as connection:
        await serves(connection, "hibari", speaking(0))
        stop, outcomes = asyncio.Event(), []

        async def caller(seed):
            while not stop.is_set():
                outcomes.append(await ask(connection, "hibari", speaking(seed, sentences=1)))

        callers = [asyncio.create_task(caller(seed)) for seed in range(8)]
        await until(lambda: asyncio.sleep(0, len(outcomes) > 20))
        kill(two, "hibari_tts")
        seen = len(outcomes)
        await until(lambda: asyncio.sleep(0, len(outcomes) > seen + 200))
        stop.set()
        await asyncio.gather(*callers)
        assert {each.kind for each in outcomes} == {"success"}


async def test_with_the_only_replica_gone_its_callers_fail_at_once_and_others_are_served(one):
    async with connected(one) as connection:
        begun = asyncio.Event()
        stream = asyncio.create_task(ask(connection, "smollm2", chatting(1, tokens=400), begun))
        await begun.wait()
        kill(one, "smollm2_135m")
        outcome = await stream
        assert (outcome.kind, outcome.error.stage) == ("StageUnavailable", "smollm2_135m")
        again = await ask(connection, "smollm2", chatting(1))
        assert again.kind == "StageUnavailable"
        assert (await ask(connection, "hibari", speaking(1))).kind == "success"
        await serves(connection, "smollm2", chatting(1))


async def test_a_stage_that_dies_between_two_stages_of_a_pipeline(one):
    """The synthesiser dies while the answer is being written: the conversation ends with its name."""
    async with connected(one) as connection:
        await serves(connection, "voice_chat", {"text": "Hello.", "params": '{"max_tokens": 8}'})
        begun = asyncio.Event()
        values = {"max_tokens": 600, "ignore_eos": True, "seed": 3}
        inputs = {"text": "Tell me a long story.", "stream": True, "params": json.dumps(values)}
        conversation = asyncio.create_task(ask(connection, "voice_chat", inputs, begun))
        await begun.wait()
        kill(one, "hibari_tts")
        outcome = await conversation
        assert (outcome.kind, outcome.error.stage) == ("StageUnavailable", "hibari_tts")
        # The writer ended with it.
        await until(lambda: idle(connection, "smollm2_135m"))
        assert (await ask(connection, "smollm2", chatting(1))).kind == "success"
        await serves(connection, "hibari", speaking(1))


async def test_a_wedged_stage_is_a_deadline_and_then_it_is_killed_and_reloaded(one):
    async with connected(one) as connection:
        await serves(connection, "hibari", speaking(0))
        stopped = stubs.stub_pids(one.pid, "hibari_tts")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        outcome = await ask(connection, "hibari", speaking(1), parameters={"timeout": 1_000_000})
        assert outcome.kind == "DeadlineExceeded"
        assert outcome.error.stage
        await serves(connection, "hibari", speaking(1))
        assert not set(stopped) & set(stubs.stub_pids(one.pid, "hibari_tts"))


async def test_a_remote_servers_death_costs_only_its_own_streams(repository, tmp_path):
    far, near = repository(), repository()
    with tritonserver(tmp_path, ["smollm2_135m"], far) as remote:
        replicate(near, "smollm2_135m", f"grpc://{remote.grpc_url}/smollm2_135m", copies=0)
        with tritonserver(tmp_path, CHAT, near) as server:
            async with connected(server) as connection:
                undisturbed = await asyncio.gather(*(ask(connection, "smollm2", chatting(seed)) for seed in range(8)))
                begun = [asyncio.Event() for _ in range(8)]
                tasks = [
                    asyncio.create_task(ask(connection, "smollm2", chatting(seed), begun[seed])) for seed in range(8)
                ]
                await asyncio.gather(*(event.wait() for event in begun))
                os.killpg(remote.pid, signal.SIGKILL)
                outcomes = await asyncio.gather(*tasks)
                failed = [each for each in outcomes if each.error]
                assert len(failed) == 4
                assert {each.kind for each in failed} == {"StageUnavailable"}
                assert all(
                    each.text == undisturbed[seed].text for seed, each in enumerate(outcomes) if each.error is None
                )
                after = await asyncio.gather(*(ask(connection, "smollm2", chatting(seed)) for seed in range(8)))
                assert {each.kind for each in after} == {"success"}

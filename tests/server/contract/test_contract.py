"""The stage contract, rule by rule, on every stage and pipeline of ``subjects``."""

import asyncio
import copy
import json
from contextlib import aclosing

import numpy as np
import pytest
from omni_runtime.errors import OmniError
from omni_runtime.kserve import text
from subjects import subjects

ALL = subjects()
LOOPS = [each for each in ALL if each.decoupled]


def on(chosen):
    return pytest.mark.parametrize("subject", chosen, ids=str)


@on(LOOPS)
async def test_rule_1_a_running_request_does_not_block_execute(model, subject):
    """While a long request runs, a second caller is answered; the long one is still there afterwards."""
    long = asyncio.create_task(model.chunks(subject.long, request_id="long"))
    await running(model, "long")
    await model.one(subject.short)
    assert (await model.control("status", "long"))["state"] == "running"
    await model.control("stop", "long")
    with pytest.raises(OmniError):
        await long


@on(LOOPS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one-shot"])
async def test_rule_2_a_success_has_one_final(model, subject, stream):
    data, finals, errors = await model.events({**subject.short, "stream": stream})
    assert (finals, errors) == (1, [])
    assert len(data) >= 1 if stream else len(data) == 1


@on(LOOPS)
async def test_rule_2_an_error_is_the_one_end(model, subject):
    for _, inputs in subject.bad:
        data, finals, errors = await model.events(inputs)
        assert (data, finals, len(errors)) == ([], 0, 1)


@on(LOOPS)
async def test_rule_2_a_stopped_request_has_one_end(model, subject):
    events = asyncio.create_task(model.events({**subject.long, "stream": True}, request_id="stopped"))
    await running(model, "stopped")
    await model.control("stop", "stopped")
    _, finals, errors = await events
    assert finals + len(errors) == 1
    assert type(errors[0]).__name__ == "Cancelled"


@on(ALL)
async def test_rule_3_empty_and_repeated_ids_are_no_keys(model, subject):
    alone = await model.one(subject.short)
    answers = await asyncio.gather(*(model.one(subject.short, request_id=name) for name in ("", "", "same", "same")))
    for answer in answers:
        model.assert_same(alone, answer)


@on(ALL)
async def test_rule_3_an_unknown_id_is_not_found(model):
    for verb in ("status", "stop"):
        error = await model.refusal({"control": verb, "control_id": "nobody"})
        assert (type(error).__name__, error.param) == ("NotFound", "control_id")


@on(LOOPS)
async def test_rule_4_a_client_who_leaves_ends_the_work(model, subject):
    await model.events({**subject.long, "stream": True}, leave_after=1)
    await model.idle()


@on(LOOPS)
async def test_rule_4_an_id_of_several_requests_is_refused(model, subject):
    twins = [asyncio.create_task(model.chunks(subject.long, request_id="twin")) for _ in range(2)]
    await counted(model, "running", 2)
    error = await model.refusal({"control": "stop", "control_id": "twin"})
    assert (type(error).__name__, error.param) == ("InvalidRequest", "control_id")
    for twin in twins:
        twin.cancel()
    await asyncio.gather(*twins, return_exceptions=True)
    await model.idle()


@on(ALL)
async def test_rule_4_status_tells_the_process(model):
    assert (await model.control("status"))["pid"] > 0


@on(LOOPS)
async def test_rule_5_a_request_ends_at_its_timeout(model, subject):
    error = await model.refusal(subject.long, parameters={"timeout": 300_000})
    assert type(error).__name__ == "DeadlineExceeded"
    assert error.stage
    await model.idle()


@on([each for each in LOOPS if "offset" in each.facts])
async def test_rule_6_offsets_count_what_came_before(model, subject):
    at = 0
    for chunk in await model.chunks(subject.short):
        assert chunk["offset"].tolist() == [at]
        at += len(chunk["audio"])
    assert at > 0


@on(LOOPS)
async def test_rule_7_the_joined_stream_is_the_one_shot_answer(model, subject):
    joined, whole = await model.joined(subject.short), await model.one(subject.short)
    model.assert_same(joined, whole)
    assert subject.joined
    for name in subject.joined:
        assert joined[name].shape == whole[name].shape


@on(ALL)
async def test_rule_8_neighbours_change_nothing(model, subject):
    requests = [subject.short, *subject.others]
    alone = [await model.one(each) for each in requests]
    together = await asyncio.gather(*(model.one(each) for each in requests * 3))
    for index, answer in enumerate(together):
        model.assert_same(alone[index % len(requests)], answer)


@on([each for each in ALL if each.seeded])
async def test_rule_9_a_seed_fixes_the_answer_and_a_drawn_one_is_returned(model, subject):
    drawn = reseeded(subject.short, None)
    first, second = await model.one(drawn), await model.one(drawn)
    if "seed" in subject.facts:
        assert first["seed"].tolist() != second["seed"].tolist()
        model.assert_same(first, await model.one(reseeded(subject.short, int(first["seed"][0]))))
    zero = await model.one(reseeded(subject.short, 0))
    model.assert_same(zero, await model.one(reseeded(subject.short, 0)))
    main = next(name for name in ("audio", "token_ids") if name in subject.compare)
    others = [await model.one(reseeded(subject.short, seed)) for seed in (1, 2, 3)]
    assert any(not np.array_equal(zero[main], other[main]) for other in others)


@on(ALL)
async def test_rule_10_facts_are_outputs(model, subject):
    answer = await model.one(subject.short)
    for name in subject.facts:
        assert answer[name].size == 1, name
    if "usage" in subject.facts:
        assert json.loads(text(answer, "usage"))


@on(ALL)
async def test_rule_11_what_is_wrong_is_refused_by_name_and_the_next_is_served(model, subject):
    before = await model.one(subject.short)
    for param, inputs in subject.bad:
        error = await model.refusal(inputs)
        assert (type(error).__name__, error.param) == ("InvalidRequest", param), (inputs, str(error))
    model.assert_same(before, await model.one(subject.short))


@on(ALL)
async def test_rule_11_wrong_tensors_are_refused(model, subject):
    for inputs in (
        {**subject.short, "no_such_input": np.zeros(1, np.float32)},
        {name: np.zeros((3, 3, 3), np.float64) for name in subject.short},
    ):
        assert type(await model.refusal(inputs)).__name__ == "InvalidRequest"
    await model.one(subject.short)


@on(ALL)
async def test_rule_13_only_what_is_requested_is_sent(model, subject):
    config = await model.connection.config(subject.name)
    everything = await model.one(subject.short)
    for output in config["output"]:
        name = output["name"]
        chunks = await model.chunks(subject.short, outputs=[name])
        assert all(set(chunk) <= {name} for chunk in chunks)
        assert any(name in chunk for chunk in chunks) == (name in everything), name


@on(LOOPS)
async def test_rule_15_what_is_too_much_is_refused_and_control_is_answered(model, subject):
    async with limited(model, max_running=1, max_waiting=2):
        callers = [asyncio.create_task(model.chunks(subject.long, request_id=str(index))) for index in range(3)]
        await counted(model, "waiting", 2)
        error = await model.refusal(subject.short)
        assert type(error).__name__ == "Overloaded"
        assert error.retry_after >= 1
        assert (await model.control("status"))["running"] == 1
        for index, caller in enumerate(callers):
            await model.control("stop", str(index))
            with pytest.raises(OmniError):
                await caller
        await model.one(subject.short)


@on([each for each in ALL if not each.decoupled])
async def test_rule_15_a_modules_queue_is_bounded(model, subject):
    config = await model.connection.config(subject.name)
    assert int(config["dynamic_batching"]["default_queue_policy"]["max_queue_size"]) > 0


async def counted(model, state, count):
    """Wait until ``count`` requests are ``state``."""
    async with asyncio.timeout(30):
        while True:
            if (await model.control("status"))[state] >= count:
                return
            await asyncio.sleep(0.02)


async def running(model, label):
    """Wait until the request called ``label`` has been taken."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await model.control("status", label)
            except OmniError:
                await asyncio.sleep(0.01)


def reseeded(inputs, seed):
    """``inputs`` with ``seed``, wherever the model takes it; None leaves it out."""
    inputs = dict(inputs)
    for name in ("params", "sampling_parameters"):
        if name in inputs:
            values = {key: value for key, value in json.loads(inputs[name]).items() if key != "seed"}
            inputs[name] = json.dumps(values if seed is None else {**values, "seed": seed})
            return inputs
    inputs.pop("seed", None)
    return inputs if seed is None else {**inputs, "seed": np.array([seed], np.int64)}


def limited(model, *, max_running=None, max_waiting=None):
    """The model reloaded with smaller limits for as long as the block lasts."""

    class Limited:
        async def __aenter__(self):
            config = copy.deepcopy(await model.connection.config(model.subject.name))
            self.config = config
            changed = copy.deepcopy(config)
            for name, value in (("max_running", max_running), ("max_waiting", max_waiting)):
                if value is not None:
                    changed["parameters"][name] = {"string_value": str(value)}
            await model.connection.load(model.subject.name, config=changed)

        async def __aexit__(self, *_):
            await model.connection.load(model.subject.name, config=self.config)

    return Limited()


@on(LOOPS)
async def test_an_iterator_that_is_closed_early_cancels(model, subject):
    answer = model.connection.stream(subject.name, {**subject.long, "stream": True}, request_id="left")
    async with aclosing(answer):
        await anext(answer)
    await model.idle()

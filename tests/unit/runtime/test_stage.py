"""The loop of a stage, with a transport that records what a caller would see."""

import asyncio
import json
import threading

import numpy as np
import pytest
from omni_runtime.errors import InvalidRequest, OmniError
from omni_runtime.kserve import array, text
from omni_runtime.request import Request
from omni_runtime.stage import Limits, StageLoop

WAIT = 10


class Caller:
    """Sees the responses of one request; ``leave()`` is a client that goes away."""

    def __init__(self):
        self.sent, self.finals, self.error = [], 0, None
        self.done = threading.Event()
        self._left = False

    def send(self, outputs, *, last):
        assert not self.done.is_set(), "a response after the FINAL"
        self.sent.append(outputs)
        if last:
            self._final(None)

    def end(self, error):
        self._final(error)

    def _final(self, error):
        self.finals += 1
        self.error = error
        self.done.set()

    def cancelled(self):
        return self._left

    def leave(self):
        self._left = True

    def wait(self):
        assert self.done.wait(WAIT), "no FINAL"
        assert self.finals == 1
        return self


@pytest.fixture
def stage():
    opened = []

    def make(handler, **limits):
        opened.append(StageLoop("stage", handler, Limits(**limits)))
        return opened[-1]

    yield make
    for loop in opened:
        loop.close()


def ask(loop, label="", requested=None, timeout=None, **inputs):
    caller = Caller()
    tensors = {name: array(value) for name, value in inputs.items()}
    loop.submit(Request(tensors, caller, label=label, requested=requested, timeout=timeout))
    return caller


async def counts(request):
    for index in range(3):
        yield {"text": str(index), "audio": np.full(2, index, np.float32), "offset": np.array([2 * index])}


async def forever(request):
    yield {"text": "first"}
    await asyncio.Event().wait()


def test_a_stream_gets_its_chunks_and_then_one_final(stage):
    caller = ask(stage(counts), stream=True).wait()
    assert [text(chunk, "text") for chunk in caller.sent] == ["0", "1", "2"]
    assert caller.error is None


def test_without_stream_there_is_exactly_one_response_and_it_is_the_joined_stream(stage):
    (whole,) = ask(stage(counts)).wait().sent
    assert text(whole, "text") == "012"
    assert whole["audio"].tolist() == [0, 0, 1, 1, 2, 2]
    assert whole["offset"].tolist() == [0]


def test_only_requested_outputs_are_sent(stage):
    (whole,) = ask(stage(counts), requested=frozenset({"text"})).wait().sent
    assert set(whole) == {"text"}


async def refuses(request):
    raise InvalidRequest("no", param="text")
    yield


async def breaks_late(request):
    yield {"text": "first"}
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("handler", "kind"), [(refuses, "InvalidRequest"), (breaks_late, "Internal")])
def test_an_error_is_the_one_final(stage, handler, kind, stream):
    caller = ask(stage(handler), stream=stream, label="mine").wait()
    assert type(caller.error).__name__ == kind
    assert (caller.error.stage, caller.error.request) == ("stage", "mine")


def test_an_empty_result_still_ends(stage):
    async def nothing(request):
        return
        yield

    assert ask(stage(nothing), stream=True).wait().error is None
    assert ask(stage(nothing)).wait().error is None


def test_a_caller_who_leaves_ends_the_handler(stage):
    ended = threading.Event()

    async def handler(request):
        try:
            yield {"text": "first"}
            await asyncio.Event().wait()
        finally:
            ended.set()

    caller = ask(stage(handler), stream=True)
    caller.leave()
    assert type(caller.wait().error).__name__ == "Cancelled"
    assert ended.wait(WAIT)


def test_a_request_that_takes_too_long_ends_with_a_deadline(stage):
    assert type(ask(stage(forever, timeout=0.05)).wait().error).__name__ == "DeadlineExceeded"
    assert type(ask(stage(forever), timeout=0.05).wait().error).__name__ == "DeadlineExceeded"


def test_waiting_counts_against_the_deadline(stage):
    loop = stage(forever, max_running=1)
    first = ask(loop)
    assert type(ask(loop, timeout=0.05).wait().error).__name__ == "DeadlineExceeded"
    first.leave()
    first.wait()


def test_more_than_may_run_and_wait_are_refused_and_the_others_are_served(stage):
    loop = stage(forever, max_running=2, max_waiting=3)
    admitted = [ask(loop) for _ in range(5)]
    refused = ask(loop).wait()
    assert type(refused.error).__name__ == "Overloaded"
    assert refused.error.retry_after >= 1
    status = json.loads(text(ask(loop, control="status").wait().sent[0], "status"))
    assert status["running"] + status["waiting"] == 5
    for caller in admitted:
        caller.leave()
    for caller in admitted:
        caller.wait()
    assert ask(stage(counts, max_running=1)).wait().error is None


def test_control_stops_and_asks_by_the_callers_label(stage):
    loop = stage(forever)
    caller = ask(loop, label="a", stream=True)
    told = ask(loop, control="status", control_id="a").wait()
    assert json.loads(text(told.sent[0], "status"))["state"] == "running"
    ask(loop, control="stop", control_id="a").wait()
    assert type(caller.wait().error).__name__ == "Cancelled"


@pytest.mark.parametrize(
    ("inputs", "kind", "param"),
    [
        ({"control": "stop", "control_id": "nobody"}, "NotFound", "control_id"),
        ({"control": "stop"}, "NotFound", "control_id"),
        ({"control": "dance"}, "InvalidRequest", "control"),
        ({"control": "stop", "control_id": "twice"}, "InvalidRequest", "control_id"),
    ],
)
def test_a_control_request_that_fits_no_single_request_is_refused(stage, inputs, kind, param):
    loop = stage(forever)
    twins = [ask(loop, label="twice") for _ in range(2)]
    error = ask(loop, **inputs).wait().error
    assert (type(error).__name__, error.param) == (kind, param)
    assert not any(twin.done.is_set() for twin in twins)


def test_an_empty_or_repeated_label_is_no_key(stage):
    loop = stage(counts)
    callers = [ask(loop, label=label) for label in ("", "", "same", "same")]
    assert all(caller.wait().error is None for caller in callers)


def test_closing_ends_what_runs_and_refuses_what_comes(stage):
    loop = StageLoop("stage", forever, Limits())
    caller = ask(loop, stream=True)
    loop.close()
    assert type(caller.wait().error).__name__ == "Cancelled"
    assert isinstance(ask(loop).wait().error, OmniError)


def test_a_stream_flag_of_the_wrong_shape_is_refused(stage):
    error = ask(stage(counts), stream=np.array([True, False])).wait().error
    assert (type(error).__name__, error.param) == ("InvalidRequest", "stream")

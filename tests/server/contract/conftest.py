"""Asking one model, in every way that the contract speaks of."""

import asyncio
import json
from contextlib import aclosing

import grpc.aio
import numpy as np
import pytest
from omni_runtime.errors import OmniError, parse
from omni_runtime.folding import fold
from omni_runtime.kserve import CHANNEL_OPTIONS, Connection, text
from omni_runtime.wire import decode, encode
from tritonclient.grpc import service_pb2_grpc

WAIT = 60


class Model:
    """One model of the stack."""

    def __init__(self, connection, subject):
        self.connection = connection
        self.subject = subject

    async def chunks(self, inputs, *, stream=True, **options):
        """Every response."""
        if not self.subject.decoupled:
            return [await self.connection.infer(self.subject.name, inputs, timeout=WAIT, **options)]
        inputs = {"stream": stream, **inputs}
        async with aclosing(self.connection.stream(self.subject.name, inputs, timeout=WAIT, **options)) as answer:
            return [chunk async for chunk in answer]

    async def one(self, inputs, **options):
        """The response of a request that does not stream."""
        (response,) = await self.chunks(inputs, stream=False, **options)
        return response

    async def joined(self, inputs, **options):
        return fold(await self.chunks(inputs, **options))

    async def refusal(self, inputs, **options):
        with pytest.raises(OmniError) as refused:
            await self.chunks(inputs, **options)
        return refused.value

    async def control(self, verb, control_id=""):
        outputs = await self.chunks({"control": verb, "control_id": control_id}, outputs=["status"])
        return json.loads(text(outputs[0], "status"))

    async def events(self, inputs, *, leave_after=None, request_id=""):
        """The raw events of one stream up to its end: (responses with data, finals, errors)."""
        request = encode(
            self.subject.name, inputs, parameters={"triton_enable_empty_final_response": True}, request_id=request_id
        )

        async def requests():
            yield request

        async with grpc.aio.insecure_channel(self.connection.url, options=CHANNEL_OPTIONS) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests(), timeout=WAIT)
            data, finals, errors = [], 0, []
            async for event in call:
                if event.error_message:
                    errors.append(parse(event.error_message))
                    continue
                final = event.infer_response.parameters["triton_final_response"].bool_param
                finals += final
                if event.infer_response.outputs:
                    data.append(decode(event.infer_response))
                if leave_after is not None and len(data) >= leave_after:
                    call.cancel()
                    break
        return data, finals, errors

    async def idle(self):
        """Wait until nothing runs in the model."""
        async with asyncio.timeout(WAIT):
            while True:
                status = await self.control("status")
                if status["running"] == status["waiting"] == 0:
                    return status
                await asyncio.sleep(0.02)

    def assert_same(self, one, other):
        """``one`` and ``other`` are the same answer, as far as the subject promises."""
        for name, tolerance in self.subject.compare.items():
            if tolerance:
                assert one[name].shape == other[name].shape, name
                np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance, err_msg=name)
            else:
                assert one[name].tolist() == other[name].tolist(), name


@pytest.fixture
async def connection(stack):
    connection = Connection(stack.grpc_url)
    yield connection
    await connection.close()


@pytest.fixture
def model(connection, subject):
    return Model(connection, subject)

"""How a script calls a stage: over gRPC, one stream per child call on a shared channel.

Cancel, deadline and traceparent so belong to the request: a handler's task that is cancelled cancels its child calls.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from omni_runtime.errors import OmniError
from omni_runtime.kserve import Connection, Outputs, Parameter, Value
from omni_runtime.request import Request

DEFAULT_PORT = 8001


def own_address() -> str:
    """The gRPC address of the server that this process is a stub of: OMNI_GRPC, else its ``--grpc-port``, else 8001."""
    if address := os.environ.get("OMNI_GRPC"):
        return address
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        words = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, separator, value = word.partition("=")
        if name == "--grpc-port" and (port := value if separator else following).isdigit():
            return f"127.0.0.1:{port}"
    return f"127.0.0.1:{DEFAULT_PORT}"


class Pool:
    """The replicas of a stage, called for the requests of one script.

    Args:
        stage: the Triton model.
        connection: the shared channel to its server.
        timeout: seconds that one call may take; the request's own timeout counts too.
    """

    def __init__(self, stage: str, connection: Connection, *, timeout: float = 120.0) -> None:
        self.stage = stage
        self._connection = connection
        self._timeout = timeout

    async def infer(
        self, parent: Request, inputs: Mapping[str, Value], *, outputs: Sequence[str] | None = None
    ) -> Outputs:
        """One answer of a stage that is not decoupled."""
        try:
            return await self._connection.infer(
                self.stage,
                inputs,
                outputs=outputs,
                request_id=uuid.uuid4().hex,
                timeout=parent.remaining(self._timeout),
                headers=parent.headers,
            )
        except OmniError as error:
            raise self._named(error) from None

    async def stream(
        self,
        parent: Request,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AsyncGenerator[Outputs, None]:
        """The answers of a decoupled stage or of another pipeline, streamed."""
        try:
            async with aclosing(
                self._connection.stream(
                    self.stage,
                    {**inputs, "stream": True},
                    outputs=outputs,
                    parameters=parameters,
                    request_id=uuid.uuid4().hex,
                    timeout=parent.remaining(self._timeout),
                    headers=parent.headers,
                )
            ) as answers:
                async for answer in answers:
                    yield answer
        except OmniError as error:
            raise self._named(error) from None

    def _named(self, error: OmniError) -> OmniError:
        error.stage = error.stage or self.stage
        error.request = None
        return error

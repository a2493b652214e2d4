"""What every AR engine offers to its stage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Protocol

from omni_runtime.ar.messages import Delta, Prompt, Stats
from omni_runtime.ar.sampling import Sampling
from omni_runtime.errors import Internal

HIDDEN_STATES = "hidden_states"


class Engine(Protocol):
    """Generates for many requests at once; the shape of vLLM's AsyncLLM, so that it fits behind this too."""

    name: str
    device: str

    def generate(
        self, prompt: Prompt, sampling: Sampling, request_id: str, taps: frozenset[str] = frozenset()
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of one request; closing the iterator aborts it.

        ``request_id`` is unique among the requests in flight. ``taps`` names what to return per token beside the text
        (``hidden_states``). A consumer that is behind gets everything that waits in one delta.

        Raises (at the first step of the iteration):
            InvalidRequest: a prompt that is empty, too long or malformed, an unknown tap, a repeated id.
            Internal: the engine is closed, or its network failed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request within one step; its iterator raises Cancelled. An unknown id is ignored."""
        ...

    async def close(self) -> None:
        """Fail what runs, end the engine's thread or process. May be repeated."""
        ...

    def stats(self) -> Stats: ...


def build(name: str, directory: Path, arguments: Mapping[str, Any]) -> Engine:
    """The engine ``name`` (``torch`` or ``auto``) over the checkpoint in ``directory``, loaded and warm.

    ``arguments`` are those of model.json: the fields of the engine's own settings.

    Raises:
        Internal: no such engine, an unknown argument, or a checkpoint that cannot be served.
    """
    if name not in ("auto", "torch"):
        raise Internal(f"engine {name} is not available; there is: torch")
    from omni_runtime.ar.settings import Settings
    from omni_runtime.ar.torch_engine import TorchEngine

    return TorchEngine(directory, Settings.parse(arguments))

"""Client of a Triton-Omni server: `Client`, `AsyncClient`, the OpenAI frontend and the command line.

Names are imported when they are used, so that `import omni_client` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_client.aio import AsyncClient as AsyncClient
    from omni_client.client import Client as Client
    from omni_client.types import ChatChunk as ChatChunk
    from omni_client.types import Model as Model
    from omni_client.types import Reply as Reply
    from omni_client.types import Segment as Segment
    from omni_client.types import Speech as Speech
    from omni_client.types import SpeechChunk as SpeechChunk
    from omni_client.types import Transcript as Transcript
    from omni_client.types import TranscriptChunk as TranscriptChunk
    from omni_client.types import Usage as Usage
    from omni_client.types import Word as Word

_HOMES = {"AsyncClient": "omni_client.aio", "Client": "omni_client.client"}
_TYPES = (
    "ChatChunk",
    "Model",
    "Reply",
    "Segment",
    "Speech",
    "SpeechChunk",
    "Transcript",
    "TranscriptChunk",
    "Usage",
    "Word",
)
__all__ = ["AsyncClient", "ChatChunk", "Client", "Model", "Reply", "Segment", "Speech", "SpeechChunk"]
__all__ += ["Transcript", "TranscriptChunk", "Usage", "Word"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or ("omni_client.types" if name in _TYPES else None)
    if home is None:
        raise AttributeError(f"module 'omni_client' has no attribute {name!r}")
    return getattr(import_module(home), name)

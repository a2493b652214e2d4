"""What one frontend is told at start; every field is a flag of `triton-omni frontend`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Settings:
    """Checks itself; raises ValueError naming the field."""

    triton: str = "127.0.0.1:8001"
    """HOST:PORT of the server's gRPC endpoint."""
    triton_metrics: str | None = None
    """URL of the server's metrics page; by default port 8002 of the same host."""
    triton_headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every gRPC call: the key of a server that restricts its APIs."""
    host: str = "127.0.0.1"
    port: int = 9000
    """0 picks a free one."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of pipelines, for clients with fixed names: {"tts-1": "hibari"}."""
    api_keys: tuple[str, ...] = ()
    """Empty: everyone may call."""
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 25 * 2**20
    max_held_bytes: int = 1 << 30
    """All bodies in memory at once; a request beyond it gets 429."""
    max_audio_seconds: float = 7200.0
    """Longest audio, decoded, in one request."""
    max_connections: int = 256
    """Requests answered at once; those beyond it get 429."""
    max_choices: int = 128
    """Most answers (n, times prompts) in one request."""
    request_timeout: float = 3600.0
    """Seconds a pipeline may take over one request."""
    body_timeout: float = 60.0
    """Seconds a body may take to arrive."""
    write_timeout: float = 60.0
    """Seconds a client may leave one chunk of an answer unread."""
    refresh: float = 5.0
    """Seconds for which what the server said about its pipelines is believed."""
    grace: float = 30.0
    """Seconds that requests in flight have to finish after SIGTERM."""
    decoders: int = 2
    """Worker processes that decode media."""
    decoded_rate: int = 16_000
    """Hz to which audio is brought while it is decoded: recognisers work at it, and a long file stays small."""
    warm: bool = True
    """Start decoders and load codecs while nobody waits for them."""
    log_format: Literal["json", "text"] = "json"

    def __post_init__(self) -> None:
        positive = (
            "max_body_bytes", "max_held_bytes", "max_audio_seconds", "max_connections", "max_choices",
            "request_timeout", "body_timeout", "write_timeout", "decoders", "decoded_rate",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        if not 0 <= self.port < 65536:
            raise ValueError("port must be in 0..65535")
        host, _, port = self.triton.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"triton must be HOST:PORT, not {self.triton!r}")
        if "" in self.api_keys:
            raise ValueError("api_keys must not hold an empty key")

    @property
    def metrics_url(self) -> str:
        if self.triton_metrics is None:
            return f"http://{self.triton.rpartition(':')[0]}:8002/metrics"
        if "://" in self.triton_metrics:
            return self.triton_metrics
        return f"http://{self.triton_metrics}/metrics"


def parse_aliases(pairs: list[str]) -> dict[str, str]:
    """["tts-1=hibari"] -> {"tts-1": "hibari"}; raises ValueError."""
    aliases = {}
    for pair in pairs:
        alias, _, name = pair.partition("=")
        if not alias or not name:
            raise ValueError(f"an alias is NAME=PIPELINE, not {pair!r}")
        aliases[alias] = name
    return aliases

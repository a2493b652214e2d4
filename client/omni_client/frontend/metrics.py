"""The frontend's own metric families, joined with the page of the Triton server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Names the file in which a launcher counts what it did; it is set by `serve`.
SUPERVISION = "OMNI_SUPERVISION_METRICS"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One registry per app, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "omni_frontend_requests", "Requests answered", ("route", "model", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "omni_frontend_request_seconds", "From the request's head to the answer's last byte", ("route", "model"),
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.first_byte = Histogram(
            "omni_frontend_first_byte_seconds", "From the request's head to the answer's first byte",
            ("route", "model"), buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.bytes = Counter("omni_frontend_sent_bytes", "Body bytes sent", ("route",), registry=self.registry)
        self.in_flight = Gauge(
            "omni_frontend_requests_in_flight", "Requests being answered", ("route",), registry=self.registry
        )
        self.cancellations = Counter(
            "omni_frontend_cancellations", "Requests whose client left before the answer's end", ("route",),
            registry=self.registry,
        )  # fmt: skip
        self.deadlines = Counter(
            "omni_frontend_deadlines", "Requests that were not done in time, by the stage that was waited for",
            ("route", "stage"), registry=self.registry,
        )  # fmt: skip
        self.replicas = Gauge(
            "omni_frontend_pool_replicas", "Replicas of a model as this frontend sees them, by state (live, out)",
            ("model", "state"), registry=self.registry,
        )  # fmt: skip
        self.evictions = Counter(
            "omni_frontend_pool_evictions", "Replicas of a model taken out of use", ("model",), registry=self.registry
        )
        self.triton_up = Gauge(
            "omni_frontend_triton_metrics_up", "1 when Triton's metrics page answered", registry=self.registry
        )

    def pool(self, model: str, live: int, size: int, evicted: bool) -> None:
        """A replica of `model` has been taken out of use, or all are known, or one is back."""
        self.replicas.labels(model, "live").set(live)
        self.replicas.labels(model, "out").set(size - live)
        self.evictions.labels(model).inc(int(evicted))

    async def page(self, triton_url: str) -> bytes:
        """Triton's metrics, if its page can be read, then the supervision's, where there is one, and the frontend's."""
        theirs = b""
        try:
            async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
                answer = await client.get(triton_url)
            if answer.status_code == 200:
                theirs = answer.content.rstrip(b"\n") + b"\n"
        except httpx.HTTPError:
            pass
        self.triton_up.set(1 if theirs else 0)
        return theirs + await asyncio.to_thread(_supervision) + generate_latest(self.registry)


def _supervision() -> bytes:
    """What `serve` has had to reload and restart; it replaces the file in one step."""
    path = os.environ.get(SUPERVISION)
    try:
        return Path(path).read_bytes() if path else b""
    except OSError:
        return b""

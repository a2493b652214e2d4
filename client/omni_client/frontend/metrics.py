"""The frontend's own metric families, joined with the page of the Triton server."""

from __future__ import annotations

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
        self.in_flight = Gauge("omni_frontend_requests_in_flight", "Requests being answered", registry=self.registry)
        self.triton_up = Gauge(
            "omni_frontend_triton_metrics_up", "1 when Triton's metrics page answered", registry=self.registry
        )

    async def page(self, triton_url: str) -> bytes:
        """Triton's metrics, if its page can be read, and then the frontend's."""
        theirs = b""
        try:
            async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
                answer = await client.get(triton_url)
            if answer.status_code == 200:
                theirs = answer.content.rstrip(b"\n") + b"\n"
        except httpx.HTTPError:
            pass
        self.triton_up.set(1 if theirs else 0)
        return theirs + generate_latest(self.registry)

"""The metric families of a stage, in Triton's own /metrics beside its ``nv_`` ones."""

from __future__ import annotations

import threading
from typing import Any, Protocol, TypeAlias

Labels: TypeAlias = tuple[tuple[str, str], ...]


class StageMetrics(Protocol):
    """What a stage loop reports."""

    def in_flight(self, count: int) -> None: ...

    def waited(self, seconds: float) -> None: ...

    def refused(self) -> None: ...

    def cancelled(self) -> None: ...

    def failed(self, error: str) -> None: ...

    def flush(self) -> None: ...


class NullMetrics:
    """For a loop outside of Triton."""

    def in_flight(self, count: int) -> None:
        del count

    def waited(self, seconds: float) -> None:
        del seconds

    def refused(self) -> None: ...

    def cancelled(self) -> None: ...

    def failed(self, error: str) -> None:
        del error

    def flush(self) -> None: ...


class Family:
    """A counter or gauge family of one stage; a metric is made when its labels are first used.

    Telling Triton is a round trip to the server's process, too dear for every token: values are kept until
    :meth:`flush`. Triton knows a family by its name, so the stages of a server that make the same one share it.
    """

    def __init__(self, pb_utils: Any, kind: str, name: str, description: str, **labels: str) -> None:
        self._labels = labels
        self._counts = kind == "COUNTER"
        self._family = pb_utils.MetricFamily(
            name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind)
        )
        self._metrics: dict[Labels, Any] = {}
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, value: float = 1.0, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value

    def set(self, value: float, **labels: str) -> None:
        with self._lock:
            self._values[tuple(sorted(labels.items()))] = value

    def flush(self) -> None:
        """Tell Triton what has come since the last time."""
        with self._lock:
            values, self._values = self._values, {}
        for key, value in values.items():
            if key not in self._metrics:
                self._metrics[key] = self._family.Metric(labels={**self._labels, **dict(key)})
            if self._counts:
                self._metrics[key].increment(value)
            else:
                self._metrics[key].set(value)


class TritonMetrics:
    """:class:`StageMetrics` on ``pb_utils.MetricFamily``; 2.51 has counters and gauges, so a mean is sum over count."""

    def __init__(self, pb_utils: Any, stage: str) -> None:
        self._families: list[Family] = []

        def family(kind: str, name: str, description: str) -> Family:
            self._families.append(Family(pb_utils, kind, f"omni_{name}", description, stage=stage))
            return self._families[-1]

        self._in_flight = family("GAUGE", "requests_in_flight", "Requests admitted and not yet ended")
        self._admitted = family("COUNTER", "requests_admitted_total", "Requests that began to run")
        self._wait = family("COUNTER", "queue_seconds_total", "Seconds that requests waited to run")
        self._refused = family("COUNTER", "requests_refused_total", "Requests refused by admission")
        self._cancelled = family("COUNTER", "requests_cancelled_total", "Requests whose caller left")
        self._failed = family("COUNTER", "requests_failed_total", "Requests that ended with an error, by its type")
        self._first = family("COUNTER", "first_output_seconds_total", "Seconds to the first token or audio, summed")
        self._firsts = family("COUNTER", "first_output_total", "Requests that reached their first token or audio")
        self._audio = family("COUNTER", "audio_seconds_total", "Seconds of audio made")
        self._work = family("COUNTER", "audio_work_seconds_total", "Seconds spent on it; over audio: real-time factor")
        self._tokens = family("COUNTER", "tokens_total", "Tokens generated")
        self._steps = family("COUNTER", "engine_steps_total", "Steps of the engine")
        self._engine = family("GAUGE", "engine_info", "1 for the engine and the device that were chosen")
        self._replicas = family("GAUGE", "pool_replicas", "Replicas of a stage that this model calls, by state")
        self._evictions = family("COUNTER", "pool_evictions_total", "Replicas taken out of use")
        self._in_flight.set(0)

    def flush(self) -> None:
        for family in self._families:
            family.flush()

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def pool(self, name: str, live: int, size: int, evicted: bool) -> None:
        self._replicas.set(live, pool=name, state="live")
        self._replicas.set(size - live, pool=name, state="out")
        if evicted:
            self._evictions.add(pool=name)

    def waited(self, seconds: float) -> None:
        self._admitted.add()
        self._wait.add(seconds)

    def refused(self) -> None:
        self._refused.add()

    def cancelled(self) -> None:
        self._cancelled.add()

    def failed(self, error: str) -> None:
        self._failed.add(error=error)

    def first_output(self, seconds: float, kind: str) -> None:
        self._first.add(seconds, kind=kind)
        self._firsts.add(kind=kind)

    def audio(self, seconds: float, work: float) -> None:
        self._audio.add(seconds)
        self._work.add(work)

    def tokens(self, count: int) -> None:
        self._tokens.add(count)

    def steps(self, count: int) -> None:
        self._steps.add(count)

    def engine(self, engine: str, device: str) -> None:
        self._engine.set(1, engine=engine, device=device)

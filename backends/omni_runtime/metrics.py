"""The metric families of a stage, in Triton's own /metrics beside its ``nv_`` ones."""

from __future__ import annotations

from typing import Any, Protocol


class StageMetrics(Protocol):
    """What a stage loop reports."""

    def in_flight(self, count: int) -> None: ...

    def waited(self, seconds: float) -> None: ...

    def refused(self) -> None: ...

    def cancelled(self) -> None: ...

    def failed(self, error: str) -> None: ...


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


class Family:
    """A counter or gauge family of one stage; a metric is made when its labels are first used.

    Triton keeps a family for as long as its object lives and identifies it by name, so every stage of a server that
    makes the same family shares it. Each stub process makes its own objects.
    """

    def __init__(self, pb_utils: Any, kind: str, name: str, description: str, **labels: str) -> None:
        self._pb = pb_utils
        self._labels = labels
        self._family = pb_utils.MetricFamily(
            name=name,
            description=description,
            kind=getattr(pb_utils.MetricFamily, kind),
        )
        self._metrics: dict[tuple[tuple[str, str], ...], Any] = {}

    def _metric(self, labels: dict[str, str]) -> Any:
        key = tuple(sorted(labels.items()))
        if key not in self._metrics:
            self._metrics[key] = self._family.Metric(labels={**self._labels, **labels})
        return self._metrics[key]

    def add(self, value: float = 1.0, **labels: str) -> None:
        self._metric(labels).increment(value)

    def set(self, value: float, **labels: str) -> None:
        self._metric(labels).set(value)


class TritonMetrics:
    """:class:`StageMetrics` on ``pb_utils.MetricFamily``; 2.51 has counters and gauges, so a mean is sum over count."""

    def __init__(self, pb_utils: Any, stage: str) -> None:
        def family(kind: str, name: str, description: str) -> Family:
            return Family(pb_utils, kind, f"omni_{name}", description, stage=stage)

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
        self._in_flight.set(0)

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

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

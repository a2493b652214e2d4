"""Figures of a benchmark: samples in, a table and JSON out."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np


@dataclass(frozen=True)
class Figure:
    """One line of the report. ``aim`` is what it is held against, in words; ``met`` None where there is none."""

    name: str
    p50: float
    p99: float
    unit: str
    count: int
    aim: str = ""
    met: bool | None = None


def figure(name: str, samples: list[float], unit: str) -> Figure:
    """The 50th and 99th percentile of ``samples``."""
    return Figure(name, float(median(samples)), float(np.percentile(samples, 99)), unit, len(samples))


def ratio(name: str, over: list[float], under: list[float], *, at_most: float = 0.0, at_least: float = 0.0) -> Figure:
    """The ratios of pairs measured one after the other, so that a machine that drifts does not count."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    middle = median(ratios)
    aim = f"<= {at_most:g}" if at_most else f">= {at_least:g}"
    met = middle <= at_most if at_most else middle >= at_least
    return Figure(name, middle, float(np.percentile(ratios, 99)), "x", len(ratios), aim, met)


def machine() -> str:
    """What the figures were measured on."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{len(names)} cores of {model}, Python {platform.python_version()}"


def table(figures: list[Figure]) -> str:
    """Markdown, for docs/benchmarks.md."""
    lines = ["| figure | p50 | p99 | n | aim |", "|---|---|---|---|---|"]
    for each in figures:
        aim = f"{each.aim} ({'met' if each.met else 'missed'})" if each.aim else ""
        lines.append(
            f"| {each.name} | {each.p50:.3g} {each.unit} | {each.p99:.3g} {each.unit} | {each.count} | {aim} |"
        )
    return "\n".join(lines)


def as_json(figures: list[Figure]) -> list[dict[str, object]]:
    return [asdict(each) for each in figures]

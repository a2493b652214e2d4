"""Several things awaited, of which the first to end decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_of(*work: Awaitable[Any]) -> Any:
    """Run all of `work` until one ends, cancel the others, and return its result or raise its error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def within(wait: Awaitable[Any], seconds: float | None, other: asyncio.Future[Any] | None = None) -> bool:
    """Whether `wait` ended within `seconds` and before `other`; else it is cancelled, `other` never is."""
    task = asyncio.ensure_future(wait)
    try:
        await asyncio.wait({task, other} if other else {task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()

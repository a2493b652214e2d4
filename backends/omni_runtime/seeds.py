"""Randomness that comes from the request: one seed, split by name for each stage that draws."""

from __future__ import annotations

import hashlib
import secrets

SEED_LIMIT = 2**63


def draw() -> int:
    """A fresh seed in [0, 2**63), for a request that brings none (0 is a seed)."""
    return secrets.randbelow(SEED_LIMIT)


def split(seed: int, *names: str | int) -> int:
    """The seed of the part called ``names``: a hash, so that neighbouring seeds and parts share nothing."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *names):
        digest.update(f"{part}\0".encode())
    return int.from_bytes(digest.digest(), "little") % SEED_LIMIT

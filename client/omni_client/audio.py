"""Audio in files and samples in memory: decode any file a person has, encode in the formats the routes offer.

Everywhere a sample is a float32 in [-1, 1], mono, and a rate is in Hz.
"""

from __future__ import annotations

from omni_client.decoder import MAX_SECONDS, Decoder, Samples, Source, decode
from omni_client.encoder import EXTENSIONS, MEDIA_TYPES, Encoder, check_format, encode, format_of, to_pcm16, wav_header

__all__ = [
    "EXTENSIONS",
    "MAX_SECONDS",
    "MEDIA_TYPES",
    "Decoder",
    "Encoder",
    "Samples",
    "Source",
    "check_format",
    "decode",
    "encode",
    "format_of",
    "to_pcm16",
    "wav_header",
]

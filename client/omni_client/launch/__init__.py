"""`triton-omni serve` and `triton-omni demo`: the whole stack in one command."""

from omni_client.launch.commands import register

__all__ = ["register"]

"""The process behind `decoding`: reads requests from a socket, decodes within its limits, writes samples to a file."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# Before numpy loads: an idle thread pool would count against the limit on memory.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")

from omni_runtime.errors import InvalidRequest, OmniError

from omni_client.decoder import Decoder
from omni_client.decoding import Limits


def confine(limits: Limits) -> None:
    """Apply what holds for the life of the process: address space, file size, no core file."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, mapped + limits.memory_bytes)
    _lower(resource.RLIMIT_FSIZE, limits.decoded_bytes + 1)
    _lower(resource.RLIMIT_CORE, 0)


def decode(request: dict[str, Any], source: int, target: int, limits: Limits) -> dict[str, Any]:
    """Decode the file descriptor `source` into float32 samples in `target`; the reply, refusals included."""
    written = 0
    try:
        with os.fdopen(source, "rb") as file, os.fdopen(target, "wb") as samples:
            decoder = Decoder(
                file,
                max_seconds=limits.max_seconds,
                sample_rate=request["sample_rate"],
                param=request["param"],
            )
            for block in decoder:
                written += block.nbytes
                if written > limits.decoded_bytes:
                    raise InvalidRequest(f"the audio is more than {limits.decoded_bytes >> 20} MiB when decoded")
                samples.write(block.tobytes())
        return {"samples": written // 4, "sample_rate": decoder.sample_rate}
    except OmniError as error:
        reason = "memory" if isinstance(error.__cause__, MemoryError) else ""
        return {"type": type(error).__name__, "message": error.message, "reason": reason}
    except MemoryError:
        return {"type": "InvalidRequest", "message": "the audio needs too much memory to decode", "reason": "memory"}
    except Exception as error:
        return {"type": "InvalidRequest", "message": f"the audio cannot be decoded ({type(error).__name__})"}


def serve(link: socket.socket) -> None:
    """Answer requests until the other side closes."""
    with link, link.makefile("r") as lines:
        limits = Limits(**json.loads(lines.readline()))
        confine(limits)
        link.sendall(b"{}\n")
        while True:
            message, fds, _, _ = socket.recv_fds(link, 65_536, 2)
            if not message:
                return
            # The default action of the alarm ends the process, also when it is deep in a codec.
            signal.setitimer(signal.ITIMER_REAL, limits.seconds)
            reply = decode(json.loads(message), fds[0], fds[1], limits)
            signal.setitimer(signal.ITIMER_REAL, 0)
            reply["peak_bytes"] = _peak_bytes()
            with suppress(BrokenPipeError):
                link.sendall(json.dumps(reply).encode() + b"\n")


def _peak_bytes() -> int:
    # getrusage counts what the parent held when it started us; the kernel's own line does not.
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard) if hard == resource.RLIM_INFINITY or hard >= value else (hard, hard))


if __name__ == "__main__":
    # Ctrl-C belongs to the parent; when it goes, the socket ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))

"""Bytes per device of a set of models, added up before anything loads."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from omni_runtime.errors import InvalidRequest, NotFound

from omni_build import memory
from omni_build.repository import Repository
from omni_build.target import ARGUMENTS

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Resident bytes of one stub process beside its weights, measured with the pip server 2.51 on x86-64.
_PROCESS = {"omni_ar": 480 << 20, "omni_module": 200 << 20}
_SCRIPT = 80 << 20


@dataclass(frozen=True)
class Need:
    """What one model takes: weights and cache on `device`, and processes, which are always in the CPU's memory."""

    model: str
    device: str
    weights: int
    cache: int
    process: int

    def on(self, device: str) -> int:
        own = self.weights + self.cache if device == self.device else 0
        return own + (self.process if device == "cpu" else 0)


@dataclass(frozen=True)
class Plan:
    """`needs` in load order, `free` bytes by device as they were before."""

    needs: Sequence[Need]
    free: Mapping[str, int]

    def total(self, device: str) -> int:
        return sum(need.on(device) for need in self.needs)

    def lines(self) -> list[str]:
        """A table for people, in MiB."""
        rows = [("model", "device", "weights", "cache", "process")]
        rows += [
            (need.model, need.device, _mib(need.weights), _mib(need.cache), _mib(need.process)) for need in self.needs
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        table = [
            f"{model:<{widths[0]}}  {device:<{widths[1]}}"
            + "".join(f"  {cell:>{width}}" for cell, width in zip(figures, widths[2:], strict=True))
            for model, device, *figures in rows
        ]
        sums = [
            f"{device}: {_mib(self.total(device))} MiB of {_mib(free)} MiB that are free"
            for device, free in self.free.items()
            if self.total(device)
        ]
        return [*table, *sums]


def plan(models: Sequence[str], repository: Repository, *, free: Mapping[str, int] | None = None) -> Plan:
    """Add up `models` and everything below them. `free`: bytes by device (default: this machine's, now).

    Raises InvalidRequest, naming the first model that does not fit, NotFound for one that is not built.
    """
    free = dict(free) if free is not None else memory.free()
    order = list(dict.fromkeys(name for model in models for name in (*repository.stages_of(model), model)))
    made = Plan([_need(name, repository, free) for name in order], free)
    left = dict(free)
    for need in made.needs:
        for device in dict.fromkeys((need.device, "cpu")):
            if need.on(device) > left.get(device, 0):
                raise InvalidRequest(
                    f"{need.model} does not fit: it needs {_mib(need.on(device))} MiB on {device} (weights "
                    f"{_mib(need.weights)}, cache {_mib(need.cache)}, process {_mib(need.process)}), where "
                    f"{_mib(left.get(device, 0))} of {_mib(free.get(device, 0))} MiB are left for it",
                    stage=need.model,
                )
            left[device] -= need.on(device)
    return made


def _need(name: str, repository: Repository, free: Mapping[str, int]) -> Need:
    config = repository.config(name)
    if config.platform == "ensemble":
        return Need(name, "cpu", 0, 0, 0)
    folder = repository.version_dir(name)
    if config.backend.startswith("omni_") and not (folder / ARGUMENTS).is_file():
        raise NotFound(f"{name} is not built: {folder / ARGUMENTS} is missing; triton-omni build makes it", stage=name)
    lost = next((file for file in folder.glob("*") if not file.exists()), None)
    if lost:
        raise NotFound(f"{lost} links to {lost.readlink()}, which is gone: triton-omni build mends it", stage=name)
    arguments = json.loads((folder / ARGUMENTS).read_text()) if (folder / ARGUMENTS).is_file() else {}
    device = arguments.get("device", "cpu")
    if device in ("auto", "cuda"):
        device = "cuda:0" if "cuda:0" in free else "cpu"
    count = max(1, sum(group.count or 1 for group in config.instance_group))
    weights = count * _weights(folder, _BYTES.get(arguments.get("dtype", "")))
    cache = count * _cache(folder, arguments)
    return Need(name, device, weights, cache, count * _PROCESS.get(config.backend, _SCRIPT))


def _weights(folder: Path, item: int | None) -> int:
    """Bytes of the weight files once loaded: a safetensors file is cast to `item` bytes an element."""
    total = 0
    for file in folder.glob("*"):
        if file.suffix == ".safetensors":
            with file.open("rb") as opened:
                header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
            tensors = [tensor for key, tensor in header.items() if key != "__metadata__"]
            stored = [tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors]
            total += sum(prod(tensor["shape"]) * item for tensor in tensors) if item else sum(stored)
        elif file.suffix in (".onnx", ".bin", ".data", ".plan"):
            total += file.stat().st_size
    return total


def _cache(folder: Path, arguments: Mapping[str, Any]) -> int:
    """What the sequences that may run at once fill, keys and values of every layer; at most `kv_cache_bytes`."""
    bound = int(arguments.get("kv_cache_bytes") or 0)
    if "max_num_seqs" not in arguments or not (folder / "config.json").is_file():
        return bound
    network = json.loads((folder / "config.json").read_text())
    heads = network.get("num_key_value_heads", network["num_attention_heads"])
    width = network.get("head_dim") or network["hidden_size"] // network["num_attention_heads"]
    token = 2 * int(network["num_hidden_layers"]) * int(heads) * int(width) * _BYTES[arguments.get("dtype", "float32")]
    full = int(arguments["max_num_seqs"]) * int(arguments["max_model_len"]) * token
    return min(full, bound) if bound else full


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"

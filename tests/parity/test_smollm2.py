"""SmolLM2 in the embedded engine against transformers, on the real weights."""

import asyncio

import pytest
import torch

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to five.",
    "Why is the sky blue? " * 12,
]


@pytest.fixture(scope="module")
def checkpoint(built):
    """The stage's version folder, as the build fills it."""
    return built / "smollm2_135m" / "1"


@pytest.fixture(scope="module")
def engine(checkpoint):
    from omni_runtime.ar.settings import Settings
    from omni_runtime.ar.torch_engine import TorchEngine

    engine = TorchEngine(checkpoint, Settings(max_num_seqs=4))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


async def answer(engine, prompt: str, name: str, **settings):
    from omni_runtime.ar.messages import Delta, Prompt
    from omni_runtime.ar.sampling import Sampling

    whole = Delta()
    async for delta in engine.generate(Prompt(text=prompt, special_tokens=False), Sampling(**settings), name):
        whole.merge(delta)
    return whole


async def test_greedy_answers_together_are_those_of_transformers_alone(engine, reference, checkpoint):
    from omni_runtime.ar.chat import apply_chat_template
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [apply_chat_template(checkpoint, [{"role": "user", "content": question}]) for question in QUESTIONS]
    found = await asyncio.gather(
        *(answer(engine, prompt, str(i), temperature=0, max_tokens=48, logprobs=0) for i, prompt in enumerate(prompts))
    )
    for question, prompt, got in zip(QUESTIONS, prompts, found, strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        assert ids["input_ids"][0].tolist() == tokenizer.encode(prompt, add_special_tokens=False)
        expected = reference.generate(**ids, max_new_tokens=48, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert got.token_ids == expected.tolist()
        assert got.text == tokenizer.decode(expected, skip_special_tokens=True)
        with torch.inference_mode():
            whole = torch.cat([ids["input_ids"], expected[None]], 1)
            logprobs = reference(whole).logits[0, ids["input_ids"].shape[1] - 1 : -1].log_softmax(-1)
        for row, (token, entries) in enumerate(zip(got.token_ids, got.logprobs, strict=True)):
            assert entries[token].logprob == pytest.approx(float(logprobs[row, token]), abs=1e-3)
    assert "Paris" in found[0].text


async def test_sampled_answers_do_not_depend_on_neighbours(engine):
    settings = dict(max_tokens=40, temperature=1.0, top_p=0.95, ignore_eos=True)
    prompts = ["The sea", "Once upon a time there was", "def main():", "Zwölf Boxkämpfer 🥊"]
    alone = [await answer(engine, prompt, "alone", seed=i, **settings) for i, prompt in enumerate(prompts)]
    together = await asyncio.gather(
        *(answer(engine, prompt, f"t{i}", seed=i, **settings) for i, prompt in enumerate(prompts))
    )
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert [each.text for each in together] == [each.text for each in alone]

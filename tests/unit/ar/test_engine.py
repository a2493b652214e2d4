"""The embedded engine: exact in batches, in chunks and under aborts; bounded; never stuck."""

import asyncio
import random
import shutil

import pytest
import torch
from omni_runtime.ar.messages import Delta, Prompt
from omni_runtime.ar.sampling import Sampling
from omni_runtime.ar.settings import Settings
from omni_runtime.ar.torch_engine import TorchEngine
from omni_runtime.errors import Cancelled, Internal, InvalidRequest
from safetensors.torch import load_file, save_file


class Answer(Delta):
    """All deltas of a request in one, and how many there were."""

    count: int = 0


async def collect(engine, prompt: Prompt | list[int], name: str, taps=frozenset(), **settings) -> Answer:
    if isinstance(prompt, list):
        prompt = Prompt(token_ids=prompt)
    settings.setdefault("ignore_eos", True)
    whole = Answer()
    async for delta in engine.generate(prompt, Sampling(**settings), name, taps):
        whole.merge(delta)
        whole.count += 1
        whole.num_prompt_tokens = delta.num_prompt_tokens
    return whole


async def settled(engine, condition) -> None:
    """Let the engine's thread go on until ``condition`` of its stats holds."""
    async with asyncio.timeout(20):
        while not condition(engine.stats()):  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 259), k=length)


def idle(stats) -> bool:
    return stats.running == 0 and stats.waiting == 0 and stats.free_slots == 4


async def test_greedy_tokens_and_states_are_those_of_transformers(engine, reference):
    for length in (1, 2, 63, 64, 65, 200):
        prompt = prompt_of(length, length)
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=300,
        )[0, length:]
        found = await collect(
            engine, prompt, "r", frozenset({"hidden_states"}), temperature=0, max_tokens=24, logprobs=3
        )
        assert found.token_ids == expected.tolist()
        with torch.inference_mode():
            whole = torch.tensor([prompt + found.token_ids])
            states = reference.model(whole).last_hidden_state[0, length - 1 : -1]
            logprobs = reference(whole).logits[0, length - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(found.hidden_states, states, atol=2e-4, rtol=1e-4)
        for row, (token, entries) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
            assert next(iter(entries)) == token
            assert entries[token].rank == 1
            assert set(entries) == set(logprobs[row].topk(3).indices.tolist())
            assert entries[token].logprob == pytest.approx(float(logprobs[row, token]), abs=1e-4)
        total = sum(entries[token].logprob for token, entries in zip(found.token_ids, found.logprobs, strict=True))
        assert found.cumulative_logprob == pytest.approx(total, abs=1e-4)


async def test_embeddings_in_equal_token_ids_in(engine, reference):
    prompt = prompt_of(1, 90)
    embeds = reference.model.embed_tokens(torch.tensor(prompt)).detach()
    by_ids, by_embeds = await asyncio.gather(
        collect(engine, prompt, "ids", temperature=0, max_tokens=20),
        collect(engine, Prompt(embeds=embeds), "embeds", temperature=0, max_tokens=20),
    )
    assert by_ids.token_ids == by_embeds.token_ids


REQUESTS = [
    dict(prompt=prompt_of(seed, length), seed=seed, **settings)
    for seed, (length, settings) in enumerate(
        [
            (1, dict(temperature=0, max_tokens=40)),
            (5, dict(temperature=1.0, max_tokens=60)),
            (64, dict(temperature=0.8, top_p=0.9, max_tokens=30)),
            (130, dict(temperature=1.2, top_k=20, repetition_penalty=1.3, max_tokens=50)),
            (260, dict(temperature=1.0, min_p=0.05, frequency_penalty=0.5, max_tokens=25)),
            (33, dict(temperature=0.7, presence_penalty=0.5, logprobs=2, max_tokens=70)),
        ]
    )
]


async def alone(engine) -> list[list[int]]:
    answers = []
    for number, request in enumerate(REQUESTS):
        settings = dict(request)
        answers.append((await collect(engine, settings.pop("prompt"), f"alone-{number}", **settings)).token_ids)
    return answers


async def test_a_batch_with_joins_leaves_and_aborts_equals_each_alone(engine):
    expected = await alone(engine)
    chance = random.Random(11)

    async def one(name: str) -> None:
        number = chance.randrange(len(REQUESTS))
        settings = dict(REQUESTS[number])
        prompt = settings.pop("prompt")
        if chance.random() < 0.3:  # leaves early
            stop_after, tokens = chance.randrange(1, 8), []
            answer = engine.generate(Prompt(token_ids=prompt), Sampling(ignore_eos=True, **settings), name)
            async for delta in answer:
                tokens += delta.token_ids
                if len(tokens) >= stop_after:
                    break
            await answer.aclose()
            assert tokens == expected[number][: len(tokens)]
            return
        assert (await collect(engine, prompt, name, **settings)).token_ids == expected[number]

    async with asyncio.TaskGroup() as group:
        for index in range(40):
            group.create_task(one(f"mixed-{index}"))
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
    await settled(engine, idle)


async def test_the_chunk_of_the_prompt_is_invisible(engine, checkpoint):
    expected = await alone(engine)
    other = TorchEngine(checkpoint, Settings(max_num_seqs=3, max_model_len=400, prefill_chunk=320))
    try:
        assert await alone(other) == expected
    finally:
        await other.close()


async def test_seeds(engine):
    prompt = prompt_of(3, 10)

    async def run(name: str, seed: int | None) -> list[int]:
        return (await collect(engine, prompt, name, seed=seed, max_tokens=20)).token_ids

    zero, again, one, none, other = await asyncio.gather(
        run("a", 0), run("b", 0), run("c", 1), run("d", None), run("e", None)
    )
    assert zero == again
    assert len({tuple(zero), tuple(one), tuple(none), tuple(other)}) == 4


async def test_text_in_and_joined_text_out(engine, tokenizer):
    found = await collect(engine, Prompt(text="hello"), "text", seed=5, max_tokens=60)
    assert found.num_prompt_tokens == 5
    assert found.text == tokenizer.decode(found.token_ids)
    assert found.finish_reason == "length"


async def test_a_stop_string_ends_and_is_not_delivered(engine):
    whole = await collect(engine, Prompt(text="stop here"), "whole", seed=8, max_tokens=80)
    readable = [at for at in range(5, len(whole.text) - 3) if "\ufffd" not in whole.text[at : at + 3]]
    stop = whole.text[readable[0] : readable[0] + 3]
    found = await collect(engine, Prompt(text="stop here"), "stop", seed=8, max_tokens=80, stop=stop)
    assert found.text == whole.text[: whole.text.index(stop)]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    kept = await collect(
        engine, Prompt(text="stop here"), "kept", seed=8, max_tokens=80, stop=[stop], include_stop_str_in_output=True
    )
    assert kept.text == found.text + stop


async def test_stop_tokens_and_min_tokens(engine):
    whole = await collect(engine, [5, 6, 7], "w", temperature=0, max_tokens=30)
    token = whole.token_ids[0]
    found = await collect(engine, [5, 6, 7], "s", temperature=0, max_tokens=30, stop_token_ids=[token])
    assert (found.token_ids, found.text, found.finish_reason, found.stop_reason) == ([token], "", "stop", token)
    later = await collect(engine, [5, 6, 7], "m", temperature=0, max_tokens=30, stop_token_ids=[token], min_tokens=4)
    assert len(later.token_ids) > 4
    assert token not in later.token_ids[:4]


async def test_the_models_own_end_counts_unless_ignored(engine):
    for seed in range(40):
        found = await collect(
            engine, [9, 9], f"eos-{seed}", seed=seed, temperature=3.0, max_tokens=300, ignore_eos=False
        )
        if found.finish_reason == "stop":
            break
    assert found.token_ids[-1] == 2
    assert 2 not in found.token_ids[:-1]
    assert found.stop_reason is None


async def test_a_consumer_that_is_behind_gets_everything_in_one_delta(engine):
    prompt = prompt_of(2, 4)
    expected = await collect(engine, prompt, "fast", seed=1, max_tokens=50, logprobs=1)
    answer = engine.generate(
        Prompt(token_ids=prompt), Sampling(seed=1, max_tokens=50, logprobs=1, ignore_eos=True), "slow"
    )
    first = await anext(answer)
    await settled(engine, lambda stats: stats.running == 0)
    rest = [delta async for delta in answer]
    assert len(rest) == 1
    first.merge(rest[0])
    assert (first.token_ids, first.text, first.logprobs) == (expected.token_ids, expected.text, expected.logprobs)


async def test_the_models_length_ends_an_answer(engine):
    found = await collect(engine, prompt_of(0, 390), "long", max_tokens=None, ignore_eos=True)
    assert (len(found.token_ids), found.finish_reason) == (10, "length")


@pytest.mark.parametrize(
    ("prompt", "settings", "taps", "param"),
    [
        (Prompt(token_ids=[5] * 400), {}, (), "prompt_token_ids"),
        (Prompt(text="x" * 400), {}, (), "text_input"),
        (Prompt(text=""), {}, (), "text_input"),
        (Prompt(token_ids=[]), {}, (), "prompt_token_ids"),
        (Prompt(token_ids=[259]), {}, (), "prompt_token_ids"),
        (Prompt(token_ids=[-1]), {}, (), "prompt_token_ids"),
        (Prompt(embeds=torch.zeros(3, 97)), {}, (), "prompt_embeds"),
        (Prompt(embeds=torch.zeros(96)), {}, (), "prompt_embeds"),
        (Prompt(embeds=torch.zeros(2, 96, dtype=torch.int32)), {}, (), "prompt_embeds"),
        (Prompt(embeds=torch.full((2, 96), torch.nan)), {}, (), "prompt_embeds"),
        (Prompt(text="x"), {"stop_token_ids": [300]}, (), "stop_token_ids"),
        (Prompt(text="x"), {}, ("codes",), "codes"),
    ],
)
async def test_a_bad_request_is_refused_by_name_and_the_next_is_fine(engine, prompt, settings, taps, param):
    with pytest.raises(InvalidRequest) as caught:
        await collect(engine, prompt, "bad", frozenset(taps), **settings)
    assert caught.value.param == param
    assert len((await collect(engine, [4], "good", max_tokens=3)).token_ids) == 3


def test_a_prompt_is_one_thing():
    with pytest.raises(InvalidRequest):
        Prompt()
    with pytest.raises(InvalidRequest):
        Prompt(text="x", token_ids=[1])


async def test_a_repeated_id_is_refused_while_the_first_runs(engine):
    answer = engine.generate(Prompt(token_ids=[5]), Sampling(max_tokens=300, ignore_eos=True), "twin")
    await anext(answer)
    with pytest.raises(InvalidRequest, match="in flight"):
        await collect(engine, [5], "twin")
    await answer.aclose()
    assert len((await collect(engine, [5], "twin", max_tokens=2)).token_ids) == 2


async def test_more_requests_than_slots_wait_and_all_finish(engine):
    answers = await asyncio.gather(
        *(collect(engine, prompt_of(i, 5), f"many-{i}", seed=i, max_tokens=12) for i in range(30))
    )
    assert all(len(answer.token_ids) == 12 for answer in answers)
    await settled(engine, idle)


async def test_abort_ends_the_iterator_and_frees_the_slot(engine):
    answers = [
        engine.generate(Prompt(token_ids=[5]), Sampling(max_tokens=390, ignore_eos=True), f"abort-{i}")
        for i in range(6)
    ]
    for answer in answers[:4]:
        await anext(answer)
    for i in range(6):
        await engine.abort(f"abort-{i}")
    await engine.abort("nobody")
    for answer in answers[:4]:
        with pytest.raises(Cancelled):
            async for _ in answer:
                pass
    await settled(engine, idle)


async def test_a_prompt_that_makes_no_numbers_fails_alone(checkpoint, tmp_path):
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][77] = torch.nan
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = TorchEngine(tmp_path, Settings(max_num_seqs=2, max_model_len=400))
    try:
        settings = dict(temperature=0, max_tokens=20)
        expected = await collect(engine, [5, 6], "before", **settings)
        with pytest.raises(Internal, match="not finite"):
            await collect(engine, [77] * 9, "broken", **settings)
        neighbour, failed = await asyncio.gather(
            collect(engine, [5, 6], "beside", **settings),
            collect(engine, [5, 77], "broken", **settings),
            return_exceptions=True,
        )
        assert neighbour.token_ids == expected.token_ids
        assert isinstance(failed, Internal)
        assert (await collect(engine, [5, 6], "after", **settings)).token_ids == expected.token_ids
    finally:
        await engine.close()


async def test_closing_fails_what_runs_and_what_comes(checkpoint):
    engine = TorchEngine(checkpoint, Settings(max_num_seqs=1, max_model_len=400))
    running = engine.generate(Prompt(token_ids=[5]), Sampling(max_tokens=390, ignore_eos=True), "running")
    await anext(running)
    await engine.close()
    with pytest.raises(Internal, match="closed"):
        async for _ in running:
            pass
    with pytest.raises(Internal, match="closed"):
        await collect(engine, [5], "late")
    await engine.close()


def test_the_cache_is_bounded_by_bytes(checkpoint):
    with pytest.raises(Internal, match="kv_cache_bytes"):
        TorchEngine(checkpoint, Settings(kv_cache_bytes=1000, max_model_len=100))
    slot = 2 * 3 * 2 * 128 * 16 * 4
    engine = TorchEngine(checkpoint, Settings(kv_cache_bytes=2 * slot + 1, max_model_len=100))
    try:
        assert engine.stats().free_slots == 2
        assert engine.stats().kv_cache_bytes == 2 * slot
    finally:
        engine.shutdown()


@pytest.mark.parametrize("arguments", [{"dtype": "int8"}, {"prefill_chunk": 60}, {"max_num_seqs": 0}, {"speed": 1}])
def test_a_bad_argument_is_named(arguments):
    with pytest.raises(Internal, match=next(iter(arguments))):
        Settings.parse(arguments)


def test_deltas_merge_in_order_only():
    with pytest.raises(AssertionError):
        Delta(token_ids=[1]).merge(Delta(token_ids=[2], offset=2))

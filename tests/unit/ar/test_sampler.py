"""Sampling against plain definitions over the whole sorted vocabulary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_runtime.ar.sampler import Sampler, candidates, draw, penalise, ranked
from omni_runtime.ar.sampling import Sampling

VOCAB = 300


def logits_of(seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def kept_by_definition(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """Tokens left by min_p, then top_k, then top_p, each on what the one before left."""
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    shares = logits.double().softmax(0)
    best = float(shares.max())
    left = [token for token in order if float(shares[token]) >= sampling.min_p * best * (1 - 1e-6)]
    if sampling.top_k > 0:
        left = left[: sampling.top_k]
    total, before, nucleus = sum(float(shares[token]) for token in left), 0.0, []
    for token in left:
        if before >= sampling.top_p * total:
            break
        nucleus.append(token)
        before += float(shares[token])
    return set(nucleus)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.2, 1.0, 4.0]),
    top_k=st.sampled_from([0, 1, 7, 200, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_candidates_are_those_of_the_definition(seed, spread, top_k, top_p, min_p):
    logits = logits_of(seed, spread)
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    values, indices = candidates(logits, sampling)
    assert set(indices.tolist()) == kept_by_definition(logits, sampling)
    assert torch.equal(values, logits[indices])


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf, 1.5])
    generator = torch.Generator().manual_seed(3)
    counts = torch.zeros(5)
    for _ in range(20_000):
        counts[draw(logits, generator)] += 1
    assert counts[3] == 0
    torch.testing.assert_close(counts / counts.sum(), logits.softmax(0), atol=0.015, rtol=0)


def test_penalties_by_hand():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    seen = torch.tensor([True, True, False, True])
    counts = torch.tensor([0.0, 2.0, 0.0, 1.0])
    sampling = Sampling(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    expected = torch.tensor([1.0, -4.0 - 1.0 - 0.25, 1.0, 0.25 - 0.5 - 0.25])
    torch.testing.assert_close(penalise(logits, sampling, counts, seen), expected)


def test_repetition_counts_the_prompt_and_presence_only_the_answer():
    logits = torch.tensor([1.0, 0.9, 0.0])
    sampler = Sampler(Sampling(temperature=0, repetition_penalty=1.2), 0, 3, [0], frozenset())
    assert sampler.sample(logits) == 1
    sampler = Sampler(Sampling(temperature=0, presence_penalty=1.0), 0, 3, [0], frozenset())
    assert sampler.sample(logits) == 0
    sampler.accept(0)
    assert sampler.sample(logits) == 1


def test_min_tokens_forbids_what_would_end():
    logits = torch.tensor([0.0, 5.0, 1.0])
    sampler = Sampler(Sampling(temperature=0, min_tokens=1), 0, 3, [], frozenset({1}))
    assert not sampler.plain
    assert sampler.sample(logits) == 2
    sampler.accept(2)
    assert sampler.plain
    assert sampler.sample(logits) == 1


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1])
def test_a_seed_repeats_and_leaves_the_global_generator_alone(seed):
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        sampler = Sampler(Sampling(), seed, VOCAB, [], frozenset())
        drawn.append([sampler.sample(logits_of(step)) for step in range(20)])
    assert drawn[0] == drawn[1]
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_differ():
    rows = {
        tuple(Sampler(Sampling(), seed, VOCAB, [], frozenset()).sample(logits_of(s)) for s in range(9))
        for seed in range(8)
    }
    assert len(rows) == 8


def test_ranks_are_of_the_raw_distribution():
    logits = logits_of(5)
    expected = logits.double().log_softmax(0)
    token = int(logits.argsort(descending=True)[6])
    found = ranked(logits, token, 3)
    assert found.rank == 7
    assert found.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert found.top_ids == logits.argsort(descending=True)[:3].tolist()
    assert found.top_logprobs == pytest.approx(expected[found.top_ids].tolist(), abs=1e-5)


def test_sampling_leaves_the_logits_alone():
    logits = logits_of(1)
    kept = logits.clone()
    settings_ = Sampling(temperature=0.5, repetition_penalty=1.3, min_tokens=2, top_p=0.5, min_p=0.1)
    Sampler(settings_, 0, VOCAB, [1, 2], frozenset({3})).sample(logits)
    assert torch.equal(logits, kept)

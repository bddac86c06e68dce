"""Keyed uniforms against integer arithmetic, the sampler against distributions worked out in numpy."""

import hashlib
import math

import numpy as np
import pytest
import torch

from flashflow.engines.embedded.sampler import Sampler
from flashflow.engines.uniform import sampling_key_bits, uniforms
from flashflow.messages import SamplingKey

KEY = SamplingKey(seed=7, group=3, member=1, retry=0, turn=2)
LARGEST_UNIFORM = 1 - 2**-53


def sample(logits, temperatures, draws):
    return Sampler(logits.shape[1])(logits, draws, temperatures)


def splitmix64(seed: int, index: int) -> int:
    """Output number `index` in plain integers (Steele, Lea, Flood 2014, figure 13)."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def one_key(positions: int) -> np.ndarray:
    keys = np.full(positions, sampling_key_bits(KEY), dtype=np.uint64)
    return uniforms(keys, np.arange(positions, dtype=np.int64))


def test_the_first_output_of_splitmix64_is_the_published_one():
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF


def test_uniforms_are_the_upper_53_bits_of_splitmix64_at_the_position():
    keys = np.array([0, 1, 2**64 - 1, sampling_key_bits(KEY)], dtype=np.uint64)
    positions = np.array([0, 5, 10_000, 2**31], dtype=np.int64)
    expected = [(splitmix64(int(k), int(p)) >> 11) / 2**53 for k, p in zip(keys, positions, strict=True)]
    assert uniforms(keys, positions).tolist() == expected


def test_key_bits_are_blake2b_of_the_five_numbers():
    digest = hashlib.blake2b(b"7/3/1/0/2", digest_size=8).digest()
    assert sampling_key_bits(KEY) == int.from_bytes(digest, "little")


@pytest.mark.parametrize("field", ["seed", "group", "member", "retry", "turn"])
def test_every_part_of_the_key_changes_the_draws(field):
    fields = {name: getattr(KEY, name) for name in KEY.__struct_fields__}
    other = SamplingKey(**{**fields, field: fields[field] + 1})
    assert sampling_key_bits(other) != sampling_key_bits(KEY)


def test_uniforms_fill_the_unit_interval_evenly():
    draws = one_key(100_000)
    observed, _ = np.histogram(draws, bins=100, range=(0, 1))
    chi_square = float(((observed - 1000) ** 2 / 1000).sum())
    assert draws.min() >= 0
    assert draws.max() < 1
    assert 49 < chi_square < 161, "99 degrees of freedom, 0.01 % on either side"
    neighbours = np.corrcoef(draws[:-1], draws[1:])[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(len(draws))


def test_keys_that_differ_in_one_number_draw_independently():
    keys = [sampling_key_bits(SamplingKey(0, group, member, 0, 0)) for group in range(100) for member in range(100)]
    draws = uniforms(np.array(keys, dtype=np.uint64), np.zeros(10_000, dtype=np.int64))
    observed, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert 5 < float(((observed - 500) ** 2 / 500).sum()) < 46, "19 degrees of freedom, 0.05 % on either side"


def test_tokens_are_distributed_as_the_softmax_at_the_temperature():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    temperature, count = 0.7, 50_000
    weights = np.exp(logits.double().numpy() / temperature)
    expected = count * weights / weights.sum()
    tokens, _ = sample(logits.expand(count, -1), torch.full((count,), temperature), torch.from_numpy(one_key(count)))
    observed = np.bincount(tokens.numpy(), minlength=5)
    assert ((observed - expected) ** 2 / expected).sum() < 23.5, "4 degrees of freedom, 0.01 %"


def test_logprobs_are_those_of_the_softmax_at_the_temperature():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, 40, generator=generator)
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.9, 1.3, 0.0])
    tokens, logprobs = sample(logits, temperatures, torch.from_numpy(one_key(6)))
    for row in range(6):
        scaled = logits[row].double().numpy() / (float(temperatures[row]) or 1.0)
        expected = scaled[tokens[row]] - math.log(np.exp(scaled).sum())
        assert logprobs[row].item() == pytest.approx(expected, abs=2e-6)


def test_temperature_0_takes_the_largest_logit_with_its_logprob_at_temperature_1():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    tokens, logprobs = sample(logits, torch.zeros(2), torch.tensor([0.01, 0.99], dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    expected = [3 - math.log(1 + math.e**3 + math.e), 2 - math.log(math.e**2 + math.e**-1 + 1)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_draw():
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]])).expand(4, -1)
    tokens, _ = sample(logits, None, torch.tensor([0.0, 0.2, 0.3, 0.8], dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("draw", [0.0, 0.5, LARGEST_UNIFORM])
def test_a_token_without_probability_is_never_drawn(draw):
    never = float("-inf")
    logits = torch.tensor([[never, never, 0.3, never, 0.1, never, never]])
    tokens, logprobs = sample(logits, None, torch.tensor([draw], dtype=torch.float64))
    assert tokens.item() in (2, 4)
    assert math.isfinite(logprobs.item())


def test_a_row_does_not_see_the_other_rows():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(32, 300, generator=generator)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(8)
    draws = torch.from_numpy(one_key(32))
    tokens, logprobs = sample(logits, temperatures, draws)
    for row in range(32):
        alone, alone_logprob = sample(logits[row : row + 1], temperatures[row : row + 1], draws[row : row + 1])
        assert alone.item() == tokens[row].item()
        assert torch.equal(alone_logprob[0], logprobs[row])


def test_logits_that_are_not_finite_give_a_nan_logprob():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [float("inf"), 0.0, 0.0], [0.0, 0.0, 0.0]])
    _, logprobs = sample(logits, None, torch.full((3,), 0.4, dtype=torch.float64))
    assert logprobs.isnan().tolist() == [True, True, False]

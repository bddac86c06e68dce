"""However an optimizer step is split, the parts add up to the whole."""

import torch
from algorithm_cases import evaluate, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from flashflow.algorithms.losses import Denominators, LossConfig, value_loss
from flashflow.algorithms.presets import PRESETS, resolve
from flashflow.algorithms.stats import merge_metrics, summarise

CASE = make_case(7)
NUM = len(CASE.mask)
DENOMINATORS = Denominators.of(torch.tensor(CASE.mask))
CONFIGS = [resolve(name, {}, alpha=1)[1] for name in sorted(PRESETS)]
CONFIGS += [
    resolve(name, {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, alpha=1)[1] for name in ("grpo", "dapo", "rloo")
]
CONFIGS += [LossConfig(correction={"kind": "mask", "level": "sequence", "lower": 0.1, "upper": 5, "veto": 0.3})]


@st.composite
def splits(draw):
    order = draw(st.permutations(range(NUM)))
    cuts = sorted(draw(st.sets(st.integers(1, NUM - 1))))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, NUM], strict=True)]


def close(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return bool((part - whole).abs().max() <= 1e-10 * whole.abs().max())


@settings(max_examples=150, deadline=None)
@given(config=st.sampled_from(CONFIGS), parts=splits())
def test_the_micro_batches_of_a_step_add_up_to_the_unsplit_step_in_any_order(config, parts):
    whole, whole_gradient = evaluate(config, CASE)
    loss, gradient, metrics = torch.zeros((), dtype=torch.float64), torch.zeros_like(whole_gradient), []
    for rows in parts:
        result, part = evaluate(config, CASE, denominators=DENOMINATORS, rows=rows)
        loss, metrics = loss + result.loss.detach(), [*metrics, result.metrics]
        gradient[rows] += part
    assert close(loss, whole.loss.detach())
    assert close(gradient, whole_gradient)
    merged, plain = summarise(merge_metrics(metrics)), summarise(whole.metrics)
    del merged["empty_batch"], plain["empty_batch"]
    assert merged.keys() == plain.keys()
    assert all(abs(merged[name] - plain[name]) <= 1e-10 * max(1, abs(plain[name])) for name in plain)


@settings(max_examples=30, deadline=None)
@given(config=st.sampled_from(CONFIGS), parts=splits())
def test_a_mean_over_ranks_is_undone(config, parts):
    _, whole_gradient = evaluate(config, CASE)
    gradient = torch.zeros_like(whole_gradient)
    for rows in parts:
        _, part = evaluate(config, CASE, denominators=DENOMINATORS.per_rank(len(parts)), rows=rows)
        gradient[rows] += part / len(parts)
    assert close(gradient, whole_gradient)


def test_denominators_add_up_over_micro_batches():
    mask = torch.tensor(CASE.mask)
    total = Denominators.of(mask[:2]) + Denominators.of(mask[2:])
    assert (int(total.tokens), int(total.sequences)) == (19, 5)
    assert (int(DENOMINATORS.tokens), int(DENOMINATORS.sequences)) == (19, 5)


def test_denominators_may_be_plain_numbers():
    config = LossConfig(aggregation="token_mean")
    tensors, _ = evaluate(config, CASE, denominators=DENOMINATORS)
    numbers, _ = evaluate(config, CASE, denominators=Denominators(19, 5))
    assert torch.equal(tensors.loss, numbers.loss)
    empty, gradient = evaluate(config, CASE, denominators=Denominators(0, 0), rows=[2])
    assert empty.loss.item() == 0
    assert not gradient.any()


def test_padding_differently_changes_nothing_once_the_length_is_set():
    config = LossConfig(aggregation="seq_mean_token_sum_norm")
    assert config.for_responses(32).norm_length == 32
    assert config.for_responses(32).for_responses(64).norm_length == 32
    assert LossConfig().for_responses(32) == LossConfig()
    trimmed = make_case(7)
    short = type(trimmed)(**{
        name: [row[:5] for row in values] if isinstance(values[0], list) else values
        for name, values in trimmed.__dict__.items()
    })  # fmt: skip
    rows = [b for b, row in enumerate(CASE.mask) if not any(row[5:])]
    assert len(rows) >= 3
    wide, _ = evaluate(config.for_responses(32), CASE, rows=rows)
    narrow, _ = evaluate(config.for_responses(32), short, rows=rows)
    torch.testing.assert_close(wide.loss, narrow.loss, rtol=1e-14, atol=0)


def test_the_value_loss_adds_up_too():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, NUM, 7, dtype=torch.float64, generator=generator)
    mask = torch.tensor(CASE.mask)
    config = PRESETS["ppo"][1]
    whole = value_loss(config, values=values, old_values=old, returns=returns, mask=mask)
    parts = [
        value_loss(
            config, values=values[rows], old_values=old[rows], returns=returns[rows], mask=mask[rows],
            denominators=DENOMINATORS,
        )
        for rows in ([3, 0], [5, 1, 2], [4])
    ]  # fmt: skip
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert close(merged.loss, whole.loss)
    assert merged.metrics["value"].count == 19

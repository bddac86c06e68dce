"""What stands outside the mask never matters; a NaN inside it is named; nothing masked in is no loss."""

import math

import pytest
import torch
from algorithm_cases import evaluate, make_case, reference, tensor

from flashflow.algorithms.losses import LossConfig, policy_loss, value_loss
from flashflow.algorithms.presets import PRESETS, resolve
from flashflow.errors import ContractError

CASE = make_case()
NAMES = ["logprobs", "prox_logprobs", "behaviour_logprobs", "advantages", "ref_logprobs", "entropy"]


def inputs() -> dict[str, torch.Tensor]:
    return {
        "logprobs": tensor(CASE.logp), "prox_logprobs": tensor(CASE.prox), "behaviour_logprobs": tensor(CASE.behaviour),
        "advantages": tensor(CASE.advantages), "ref_logprobs": tensor(CASE.ref), "entropy": tensor(CASE.entropy),
        "rewards": tensor(CASE.rewards), "mask": torch.tensor(CASE.mask),
    }  # fmt: skip


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_infinities_and_nans_outside_the_mask_reach_neither_loss_nor_gradient(preset):
    _, config = resolve(preset, {"kl_coefficient": 0.1, "entropy_coefficient": 0.1}, alpha=1)
    clean = inputs()
    clean["logprobs"].requires_grad_()
    plain = policy_loss(config, **clean)
    (gradient,) = torch.autograd.grad(plain.loss, clean["logprobs"])
    poisoned, poisoned_gradient = evaluate(config, CASE)
    assert torch.equal(poisoned.loss, plain.loss)
    assert torch.equal(poisoned_gradient, gradient)
    assert not gradient[clean["mask"] == 0].any()
    assert all(math.isfinite(value) for stat in poisoned.metrics.values() for value in stat)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_inside_the_mask_names_tensor_sequence_and_token(name):
    batch = inputs()
    batch[name][4, 3] = math.nan
    with pytest.raises(ContractError, match=rf"^{name} of sequence 4 is NaN at token 3"):
        policy_loss(LossConfig(), **batch)


def test_a_nan_reward_and_a_nan_sequence_advantage_are_named():
    batch = inputs() | {"rewards": tensor([1, 0, 1, math.nan, 0, 1])}
    with pytest.raises(ContractError, match=r"^rewards of sequence 3 is NaN"):
        policy_loss(LossConfig(), **batch)
    batch = inputs() | {"advantages": tensor([1, 0, math.nan, 0, math.nan, 1])}
    with pytest.raises(ContractError, match=r"^advantages of sequence 4 is NaN"):
        policy_loss(LossConfig(), **batch)


def test_two_infinities_inside_the_mask_are_named():
    batch = inputs()
    batch["logprobs"][1, 2] = batch["prox_logprobs"][1, 2] = -math.inf
    with pytest.raises(ContractError, match=r"infinities.* of sequence 1 is NaN at token 2"):
        policy_loss(LossConfig(), **batch)


def test_log_ratios_are_clamped_to_twenty():
    logp = tensor([[-1.0, -100.0]]).requires_grad_()
    old = tensor([[-100.0, -1.0]])
    result = policy_loss(
        LossConfig(aggregation="token_mean"), logprobs=logp, prox_logprobs=old, behaviour_logprobs=old,
        advantages=tensor([-1.0]), mask=torch.ones(1, 2),
    )  # fmt: skip
    assert result.loss.item() == pytest.approx((math.exp(20) + 0.8) / 2)
    assert result.metrics["r"].max == pytest.approx(math.exp(20))
    long = tensor([[-1.0] * 9])
    sequence = policy_loss(
        LossConfig(surrogate="topr", rho_high=1e30, aggregation="token_mean"), logprobs=long, prox_logprobs=None,
        behaviour_logprobs=long - 15, advantages=tensor([1.0]), mask=torch.ones(1, 9), rewards=tensor([0.0]),
    )  # fmt: skip
    assert sequence.loss.item() == pytest.approx(math.exp(20))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_batch_without_a_masked_in_token_has_loss_zero_a_zero_gradient_and_a_metric(preset):
    _, config = resolve(preset, {"kl_coefficient": 0.1, "entropy_coefficient": 0.1}, alpha=1)
    nothing = make_case(mask=[[0] * 7] * 3)
    result, gradient = evaluate(config, nothing)
    assert result.loss.item() == 0
    assert torch.equal(gradient, torch.zeros(3, 7, dtype=torch.float64))
    assert result.metrics["empty_batch"].mean == 1
    assert evaluate(config, CASE)[0].metrics["empty_batch"].mean == 0


def test_a_sequence_without_a_masked_in_token_counts_for_nothing():
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        config = LossConfig(aggregation=aggregation)
        kept = [b for b, row in enumerate(CASE.mask) if any(row)]
        assert len(kept) == len(CASE.mask) - 1
        torch.testing.assert_close(
            evaluate(config, CASE)[0].loss, evaluate(config, CASE, rows=kept)[0].loss, rtol=1e-14, atol=0
        )


def test_an_advantage_per_sequence_is_broadcast():
    batch = inputs()
    per_sequence = tensor([0.5, -1.0, 2.0, 1.0, -0.3, 0.7])
    broadcast = policy_loss(LossConfig(), **(batch | {"advantages": per_sequence.unsqueeze(1).expand(6, 7)}))
    assert torch.equal(policy_loss(LossConfig(), **(batch | {"advantages": per_sequence})).loss, broadcast.loss)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float32])
def test_a_mask_may_be_of_any_type(kind):
    batch = inputs()
    batch["mask"] = batch["mask"].to(kind)
    assert policy_loss(LossConfig(), **batch).loss.item() == pytest.approx(reference(LossConfig(), CASE)[0])


def test_what_is_missing_or_misshapen_is_named():
    batch = inputs()
    with pytest.raises(ContractError, match="needs prox_logprobs"):
        policy_loss(LossConfig(), **(batch | {"prox_logprobs": None}))
    with pytest.raises(ContractError, match="needs rewards"):
        policy_loss(LossConfig(surrogate="topr"), **(batch | {"rewards": None}))
    with pytest.raises(ContractError, match=r"kl_coefficient = 0\.1 needs ref_logprobs"):
        policy_loss(LossConfig(kl_coefficient=0.1), **(batch | {"ref_logprobs": None}))
    with pytest.raises(ContractError, match=r"entropy_coefficient = 0\.1 needs entropy"):
        policy_loss(LossConfig(entropy_coefficient=0.1), **(batch | {"entropy": None}))
    with pytest.raises(ContractError, match=r"behaviour_logprobs has shape \[6, 6\], expected \[6, 7\]"):
        policy_loss(LossConfig(), **(batch | {"behaviour_logprobs": batch["behaviour_logprobs"][:, 1:]}))
    with pytest.raises(ContractError, match=r"must be \[B,T\]"):
        policy_loss(LossConfig(), **(batch | {"logprobs": batch["logprobs"][0]}))


@pytest.mark.parametrize("surrogate", ["tis", "topr", "weighted_topr", "dppo_tv"])
def test_surrogates_with_their_own_rho_need_no_prox_pass(surrogate):
    batch = inputs() | {"logprobs": tensor(CASE.logp).requires_grad_()}
    config = LossConfig(surrogate=surrogate)
    assert not config.needs_prox
    assert torch.equal(policy_loss(config, **(batch | {"prox_logprobs": None})).loss, policy_loss(config, **batch).loss)


def test_the_value_loss_is_half_the_larger_square():
    values = tensor([[0.1, 1.0, 2.0, math.nan]]).requires_grad_()
    old, returns = tensor([[0.0, 0.0, 2.1, math.inf]]), tensor([[1.0, 2.0, 1.0, -math.inf]])
    result = value_loss(
        LossConfig(aggregation="token_mean"), values=values, old_values=old, returns=returns,
        mask=tensor([[1, 1, 1, 0]]),
    )  # fmt: skip
    # Squares, plain and clipped: .81, .81; 1, 1.8^2 = 3.24; 1, 1.
    assert result.loss.item() == pytest.approx((0.81 + 3.24 + 1) / 6)
    (gradient,) = torch.autograd.grad(result.loss, values)
    torch.testing.assert_close(gradient, tensor([[-0.9 / 3, 0, 1 / 3, 0]]))
    assert result.metrics["value_clip_fraction"].mean == pytest.approx(1 / 3)


def test_a_nan_value_is_named():
    ones = tensor([[1.0, 1.0]])
    with pytest.raises(ContractError, match=r"^values of sequence 0 is NaN at token 1"):
        value_loss(LossConfig(), values=tensor([[1.0, math.nan]]), old_values=ones, returns=ones, mask=ones)

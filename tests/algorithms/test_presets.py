"""No preset is inert off-policy, and no option is: what is accepted changes something, the rest is refused by name."""

import pytest
import torch
from algorithm_cases import MASK, Case, evaluate, make_case, poisoned, tensor

from flashflow.algorithms.advantages import token_advantages
from flashflow.algorithms.kl import kl_penalty
from flashflow.algorithms.losses import LossConfig, policy_loss, value_loss
from flashflow.algorithms.options import ADVANTAGE_OPTIONS, LOSS_OPTIONS
from flashflow.algorithms.presets import PRESETS, mistakes, resolve

CASE = make_case(1, spread=1.2, mask=MASK + MASK)
BY_SIX = [0] * 6 + [1] * 6

OTHER: dict[str, list[object]] = {
    "estimator": ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "opmd"],
    "gamma": [0.5],
    "lam": [0.3],
    "opmd_tau": [3.0],
    "opmd_baseline": ["logmeanexp"],
    "surrogate": [
        "clip", "decoupled", "tis", "topr", "weighted_topr", "cispo", "gspo", "gspo_token", "reinforce", "kimi",
        "dppo_tv",
    ],
    "loss": ["algorithm_cases:half_reinforce"],
    "anchor": ["behaviour"],
    "aggregation": ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"],
    "norm_length": [3.0],
    "clip_low": [0.6],
    "clip_high": [0.6],
    "dual_clip": [1.3],
    "w_bound": [1.1],
    "rho_low": [0.9],
    "rho_high": [1.7],
    "level": ["token"],
    "weight_positive": [0.5],
    "weight_negative": [0.5],
    "kimi_tau": [0.9],
    "tv_bound": [0.05],
    "kl_coefficient": [0.2],
    "kl_estimator": ["k1", "k3"],
    "kl_placement": ["reward"],
    "kl_importance": [False],
    "entropy_coefficient": [0.2],
    "value_clip": [0.05],
    "correction": [
        "none", {"kind": "truncate", "upper": 1.2}, {"level": "geometric"}, {"level": "sequence"}, {"veto": 0.5},
        {"kind": "mask"}, {"kind": "reject"}, {"kind": "mask", "lower": 0.8}, {"kind": "mask", "upper": 1.4},
    ],
}  # fmt: skip
"""Values other than the defaults."""

WITH_KL: dict[str, object] = {"kl_coefficient": 0.1}
NEEDS: dict[str, dict[str, object]] = {
    "kl_estimator": WITH_KL,
    "kl_placement": WITH_KL,
    "kl_importance": WITH_KL,
    "norm_length": {"aggregation": "seq_mean_token_sum_norm"},
}
"""Options that act only together with another."""

EQUAL_AT_THE_DEFAULTS = {"topr": "weighted_topr", "weighted_topr": "topr"}


def fingerprint(preset: str, overrides: dict[str, object], case: Case = CASE) -> list[torch.Tensor]:
    """All that an algorithm computes of a batch: advantages, losses, gradients."""
    advantage_config, loss_config = resolve(preset, overrides, alpha=1)
    mask = torch.tensor(case.mask)
    penalty = None
    if loss_config.kl_placement == "reward":
        penalty = loss_config.kl_coefficient * kl_penalty(
            behaviour_logprobs=poisoned(case.behaviour, case.mask),
            ref_logprobs=poisoned(case.ref, case.mask),
            mask=mask,
        )
    values = poisoned(case.entropy, case.mask)
    shaped = token_advantages(
        advantage_config, rewards=case.rewards, group_ids=BY_SIX, mask=mask, values=values, penalty=penalty
    )
    result, gradient = evaluate(loss_config, Case(**{**case.__dict__, "advantages": shaped.advantages.tolist()}))
    found = [shaped.advantages, result.loss.detach(), gradient]
    if shaped.returns is not None:
        old = tensor(case.ref)
        found.append(value_loss(loss_config, values=values, old_values=old, returns=shaped.returns, mask=mask).loss)
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_table_of_values_covers_every_option():
    assert OTHER.keys() == {*ADVANTAGE_OPTIONS, *LOSS_OPTIONS}
    assert {*ADVANTAGE_OPTIONS, *LOSS_OPTIONS, "scale"} >= LossConfig.model_fields.keys()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_an_option_changes_something_or_is_refused_by_name(preset):
    defaults = {**PRESETS[preset][0].model_dump(), **PRESETS[preset][1].model_dump()}
    plain = {option: fingerprint(preset, needed) for option, needed in {"": {}, **NEEDS}.items()}
    for option, values in OTHER.items():
        for value in values:
            overrides = NEEDS.get(option, {}) | {option: value}
            found = mistakes(preset, overrides, alpha=1, group_size=3)
            if found:
                assert [path.split(".")[0] for path, _ in found] == [option]
            elif value not in (defaults[option], "none", EQUAL_AT_THE_DEFAULTS.get(preset)):
                unchanged = plain.get(option, plain[""])
                assert not same(fingerprint(preset, overrides), unchanged), f"{option}: {value} does nothing"


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_behaviour_log_probabilities_alone_change_the_gradient_at_alpha_above_zero(preset):
    _, config = resolve(preset, {}, alpha=1)
    # Small ratios, so that neither clip nor truncation hides the change.
    case = make_case(5, spread=0.05)
    moved = [[value - 0.01 * (1 + t % 3) for t, value in enumerate(row)] for row in case.behaviour]
    # rho below 1, where the weights of tis and topr are not truncated.
    high = [[value + 0.3 for value in row] for row in case.behaviour]
    for base in (case.behaviour, high):
        _, gradient = evaluate(config, Case(**{**case.__dict__, "behaviour": base}))
        shifted = [
            [b + m - v for b, m, v in zip(*rows, strict=True)] for rows in zip(base, moved, case.behaviour, strict=True)
        ]
        _, other = evaluate(config, Case(**{**case.__dict__, "behaviour": shifted}))
        changed = (gradient - other).abs().max() > 1e-5 * gradient.abs().max()
        if changed:
            return
    raise AssertionError(f"{preset}: staleness does not reach the gradient")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_fresh_samples_give_the_policy_gradient(preset):
    """With pi = prox = mu the gradient is -A times the aggregation's factor (dppo's and kimi's penalties are 0)."""
    _, config = resolve(preset, {}, alpha=1)
    case = make_case(4)
    fresh = Case(**{**case.__dict__, "prox": case.logp, "behaviour": case.logp})
    _, gradient = evaluate(config, fresh)
    plain = LossConfig(surrogate="reinforce", aggregation=config.aggregation, scale=config.scale)
    _, expected = evaluate(plain, fresh)
    if config.surrogate == "gspo":  # one gradient for the whole sequence: the mean over its tokens
        lengths = torch.tensor(case.mask).sum(1, keepdim=True)
        expected = torch.where(torch.tensor(case.mask) == 1, expected.sum(1, keepdim=True) / lengths.clamp(min=1), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def test_the_loss_has_the_dtype_of_the_log_probabilities():
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    wide = tensor([[-1.0, -2.0]])
    result = policy_loss(
        resolve("grpo", {"kl_coefficient": 0.1}, alpha=1)[1], logprobs=logp, prox_logprobs=wide,
        behaviour_logprobs=wide, advantages=tensor([1.0]), mask=torch.ones(1, 2), ref_logprobs=wide - 1,
    )  # fmt: skip
    assert result.loss.dtype == torch.float32

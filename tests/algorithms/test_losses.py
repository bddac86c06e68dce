"""Every surrogate, aggregation, correction and KL term: loss and gradient against the plain-Python formulas."""

import pytest
import torch
from algorithm_cases import Case, evaluate, make_case, reference, tensor

from flashflow.algorithms.losses import LossConfig, policy_loss
from flashflow.algorithms.settings import CorrectionConfig
from flashflow.algorithms.stats import summarise
from flashflow.algorithms.surrogates import SURROGATES
from flashflow.errors import ConfigError, ContractError

CASE = make_case()


def agrees(config: LossConfig, case: Case = CASE) -> None:
    result, gradient = evaluate(config, case)
    loss, expected = reference(config, case)
    assert result.loss.item() == pytest.approx(loss, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient, tensor(expected), rtol=1e-11, atol=1e-14)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
def test_a_surrogate_is_its_formula(surrogate, seed):
    agrees(LossConfig(surrogate=surrogate, aggregation="token_mean"), make_case(seed))


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(clip_low=0.1, clip_high=0.28, dual_clip=1.5),
        LossConfig(surrogate="decoupled", dual_clip=1.5, w_bound=1.2),
        LossConfig(surrogate="cispo", clip_low=0.3, clip_high=0.1),
        LossConfig(surrogate="tis", rho_low=0.5, rho_high=1.5),
        LossConfig(surrogate="topr", level="token"),
        LossConfig(surrogate="weighted_topr", weight_positive=0.3, weight_negative=2.0, rho_high=3.0),
        LossConfig(surrogate="gspo", clip_low=0.2, clip_high=0.3),
        LossConfig(surrogate="gspo_token", clip_low=0.2, clip_high=0.3),
        LossConfig(surrogate="kimi", kimi_tau=0.7),
        LossConfig(surrogate="dppo_tv", tv_bound=0.02),
        LossConfig(surrogate="reinforce", scale=0.25),
        LossConfig(surrogate="clip", entropy_coefficient=0.3),
    ],
    ids=str,
)
def test_an_option_is_its_formula(config):
    agrees(config)


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "gspo", "gspo_token"])
def test_with_anchor_behaviour_r_is_rho(surrogate):
    config = LossConfig(surrogate=surrogate, anchor="behaviour", clip_high=0.3)
    agrees(config)
    assert evaluate(config, CASE)[0].metrics["w"][:2] == (19, 19)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
)
@pytest.mark.parametrize("surrogate", ["clip", "gspo"])
def test_an_aggregation_is_its_formula(aggregation, surrogate):
    agrees(LossConfig(surrogate=surrogate, aggregation=aggregation))


def test_norm_length_divides():
    agrees(LossConfig(aggregation="seq_mean_token_sum_norm", norm_length=11))


CORRECTIONS = [
    {"kind": "truncate"},
    {"kind": "truncate", "upper": 1.1},
    {"kind": "truncate", "level": "sequence", "upper": 1.5},
    {"kind": "truncate", "level": "geometric", "upper": 1.05},
    {"kind": "mask"},
    {"kind": "mask", "upper": 5},
    {"kind": "mask", "level": "sequence", "lower": 0.1, "upper": 10},
    {"kind": "mask", "level": "geometric", "lower": 0.8, "upper": 1.2},
    {"kind": "reject"},
    {"kind": "reject", "level": "sequence", "lower": 0.1, "upper": 10},
    {"kind": "reject", "level": "geometric", "lower": 0.8, "upper": 1.2},
    {"kind": "none", "veto": 0.6},
    {"kind": "truncate", "veto": 0.6},
]


@pytest.mark.parametrize("surrogate", ["clip", "gspo", "reinforce", "kimi"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_a_correction_is_its_formula(correction, surrogate):
    agrees(LossConfig(surrogate=surrogate, correction=CorrectionConfig(**correction), clip_high=0.3))


def test_geometric_bounds_default_to_a_thousandth():
    case = make_case(spread=2e-3)
    config = LossConfig(correction=CorrectionConfig(kind="mask", level="geometric"))
    agrees(config, case)
    assert 0 < evaluate(config, case)[0].metrics["masked_fraction"].mean < 1


def test_rejected_tokens_stay_in_the_denominator():
    config = LossConfig(aggregation="token_mean", correction=CorrectionConfig(kind="reject", lower=0.5, upper=1.5))
    result = policy_loss(
        config, logprobs=tensor([[-1.0, -1.0]]).requires_grad_(), prox_logprobs=tensor([[-1.0, -1.0]]),
        behaviour_logprobs=tensor([[-1.0, -3.0]]), advantages=tensor([2.0]), mask=torch.ones(1, 2),
    )  # fmt: skip
    assert result.loss.item() == -1.0
    assert result.metrics["masked_fraction"].mean == 0.5


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_is_its_formula(estimator, importance):
    agrees(LossConfig(kl_coefficient=0.4, kl_estimator=estimator, kl_importance=importance, aggregation="token_mean"))


def test_kl_in_the_reward_leaves_the_loss_alone():
    with_kl = evaluate(LossConfig(kl_coefficient=0.4, kl_placement="reward"), CASE)[0]
    assert torch.equal(with_kl.loss, evaluate(LossConfig(), CASE)[0].loss)


@pytest.mark.parametrize(
    ("A", "r", "options", "expected", "slope"),
    [
        (1, 1.5, {}, -1.2, 0),
        (1, 1.5, {"clip_high": 0.28}, -1.28, 0),
        (-1, 10, {"dual_clip": 3}, 3.0, 0),
        (-1, 10, {}, 10.0, 10),
        (-1, 0.5, {}, 0.8, 0),
        (1, 0.5, {}, -0.5, -0.5),
        (1, 1.0, {}, -1.0, -1.0),
        (-1, 1.0, {"dual_clip": 3}, 1.0, 1.0),
    ],
)
def test_the_clip_table_holds(A, r, options, expected, slope):
    logp = tensor([[-0.5]]).requires_grad_()
    old = logp.detach() - tensor(r).log()
    result = policy_loss(
        LossConfig(**options), logprobs=logp, prox_logprobs=old, behaviour_logprobs=old, advantages=tensor([[A]]),
        mask=torch.ones(1, 1),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(result.loss, logp)
    assert result.loss.item() == pytest.approx(expected, rel=1e-12)
    assert gradient.item() == pytest.approx(slope, rel=1e-12)


def test_on_policy_the_loss_is_minus_the_mean_advantage_of_a_plain_loop():
    case = make_case(3)
    on_policy = Case(**{**case.__dict__, "prox": case.logp, "behaviour": case.logp})
    result, _ = evaluate(LossConfig(), on_policy)
    total, sequences = 0.0, 0
    for A_row, row in zip(case.advantages, case.mask, strict=True):
        if any(row):
            total += sum(-A for A, m in zip(A_row, row, strict=True) if m) / sum(row)
            sequences += 1
    assert result.loss.item() == pytest.approx(total / sequences, rel=1e-15)


def test_clipped_and_masked_fractions_count_tokens():
    logp = tensor([[-1.0, -1.0, -1.0, -1.0]])
    result = policy_loss(
        LossConfig(correction=CorrectionConfig(kind="mask")), logprobs=logp.clone().requires_grad_(),
        prox_logprobs=logp - tensor([[0.5, 0.0, -0.5, 0.0]]), behaviour_logprobs=logp - tensor([[0.5, 2.0, -0.5, 0.0]]),
        advantages=tensor([1.0]), mask=torch.ones(1, 4),
    )  # fmt: skip
    assert result.metrics["clip_fraction"].mean == 0.25
    assert result.metrics["masked_fraction"].mean == 0.25


def test_metrics_are_the_ratios_and_the_mismatch_by_lag():
    result, _ = evaluate(LossConfig(), CASE)
    plain = summarise(result.metrics)
    mask = torch.tensor(CASE.mask).bool()
    log_w = (tensor(CASE.prox) - tensor(CASE.behaviour))[mask]
    w, rho = log_w.exp(), (tensor(CASE.logp) - tensor(CASE.behaviour))[mask].exp()
    assert plain["w_mean"] == pytest.approx(w.mean().item())
    assert plain["w_max"] == pytest.approx(w.max().item())
    assert plain["rho_max"] == pytest.approx(rho.max().item())
    assert plain["r_mean"] == pytest.approx((rho / w).mean().item())
    assert plain["effective_sample_size"] == pytest.approx((w.sum() ** 2 / (len(w) * w.square().sum())).item())
    k3 = w - 1 - log_w
    assert plain["mismatch_k3"] == pytest.approx(k3.mean().item())
    lags = torch.tensor(CASE.lags)[mask]
    for lag in lags.unique().tolist():
        assert plain[f"mismatch_k3_lag_{lag}"] == pytest.approx(k3[lags == lag].mean().item())
    assert sum(stat.count for name, stat in result.metrics.items() if "_lag_" in name) == len(w)


def test_without_a_prox_pass_the_sample_size_is_of_rho():
    logp = tensor([[-1.0, -2.0]])
    result = policy_loss(
        LossConfig(surrogate="tis"), logprobs=logp.clone().requires_grad_(), prox_logprobs=None,
        behaviour_logprobs=logp - tensor([[1.0, 3.0]]).log(), advantages=tensor([1.0]), mask=torch.ones(1, 2),
    )  # fmt: skip
    plain = summarise(result.metrics)
    assert plain["effective_sample_size"] == pytest.approx(16 / (2 * 10))
    assert "w_mean" not in plain


def test_a_loss_of_ones_own_is_imported_corrected_and_aggregated():
    own, own_gradient = evaluate(LossConfig(loss="algorithm_cases:half_reinforce", correction="truncate"), CASE)
    plain, gradient = evaluate(LossConfig(surrogate="reinforce", correction="truncate"), CASE)
    torch.testing.assert_close(own.loss, plain.loss / 2)
    torch.testing.assert_close(own_gradient, gradient / 2)


def test_a_loss_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"algorithm\.loss: cannot import algorithm_cases:absent"):
        evaluate(LossConfig(loss="algorithm_cases:absent"), CASE)
    with pytest.raises(ConfigError, match="is no function"):
        evaluate(LossConfig(loss="algorithm_cases:MASK"), CASE)
    with pytest.raises(ContractError, match="returned shape"):
        evaluate(LossConfig(loss="algorithm_cases:one_number"), CASE)

"""KL estimators: values, gradients, and the table of which gradient is right."""

import math

import pytest
import torch
from algorithm_cases import tensor

from flashflow.algorithms.kl import kl_estimate, kl_importance, kl_penalty
from flashflow.algorithms.losses import LossConfig, policy_loss

PI, REF = (0.7, 0.3), (0.5, 0.5)
STALE = (0.9, 0.1)


def gradient_on_the_first_logit(kind: str, sampler: tuple[float, float], *, importance: bool = False) -> float:
    """Of policy_loss on ten one-token sequences in the sampler's exact proportions."""
    first = round(10 * sampler[0])
    actions = torch.tensor([0] * first + [1] * (10 - first))
    logits = tensor(PI).log().requires_grad_()
    logp = logits.log_softmax(0)[actions].unsqueeze(1)
    behaviour = tensor(sampler).log()[actions].unsqueeze(1)
    config = LossConfig(kl_coefficient=1.0, kl_estimator=kind, kl_importance=importance, aggregation="token_mean")
    loss = policy_loss(
        config, logprobs=logp, prox_logprobs=logp.detach(), behaviour_logprobs=behaviour, advantages=torch.zeros(10),
        mask=torch.ones(10, 1), ref_logprobs=tensor(REF).log()[actions].unsqueeze(1),
    ).loss  # fmt: skip
    return torch.autograd.grad(loss, logits)[0][0].item()


def exact_gradient() -> float:
    logits = tensor(PI).log().requires_grad_()
    pi = logits.softmax(0)
    kl = (pi * (pi.log() - tensor(REF).log())).sum()
    return torch.autograd.grad(kl, logits)[0][0].item()


def test_only_k2_has_the_gradient_of_the_divergence():
    assert exact_gradient() == pytest.approx(0.17793, abs=5e-6)
    assert gradient_on_the_first_logit("k2", PI) == pytest.approx(exact_gradient(), rel=1e-12)
    assert gradient_on_the_first_logit("k1", PI) == pytest.approx(0, abs=1e-15)
    assert gradient_on_the_first_logit("k3", PI) == pytest.approx(0.2, rel=1e-12)


def test_stale_samples_bias_it_and_the_importance_weight_takes_the_bias_off_up_to_its_bound():
    assert gradient_on_the_first_logit("k2", STALE) == pytest.approx(0.1266, abs=5e-5)
    # rho is 7/9 and 3, the latter bounded by 2.
    parts = [0.3 * math.log(1.4), 0.7 * math.log(5 / 3)]
    expected = 0.9 * (7 / 9) * parts[0] + 0.1 * 2 * parts[1]
    assert gradient_on_the_first_logit("k2", STALE, importance=True) == pytest.approx(expected, rel=1e-12)
    mild = (0.6, 0.4)
    assert gradient_on_the_first_logit("k2", mild, importance=True) == pytest.approx(exact_gradient(), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "d", "value", "slope"),
    [
        ("k1", 0.5, -0.5, 1.0),
        ("k2", 0.5, 0.125, -0.5),
        ("k3", 0.5, math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k1", 30, -10, 0.0),
        ("k2", -30, 50, 0.0),
        ("k3", 30, math.exp(10) - 11, 0.0),
    ],
)
def test_an_estimator_is_its_formula_with_d_clamped_to_ten(kind, d, value, slope):
    logp = tensor([[-31.0, math.nan]]).requires_grad_()
    ref = tensor([[-31.0 + d, math.inf]])
    estimate = kl_estimate(kind, logprobs=logp, ref_logprobs=ref, mask=tensor([[1, 0]]))
    assert estimate[0].tolist() == pytest.approx([value, 0])
    assert torch.autograd.grad(estimate.sum(), logp)[0][0].tolist() == pytest.approx([slope, 0])


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate("k4", logprobs=tensor([[0.0]]), ref_logprobs=tensor([[0.0]]), mask=tensor([[1]]))


def test_the_importance_weight_has_no_gradient_and_stops_at_two():
    rho = tensor([0.5, 1.0, 3.0]).requires_grad_()
    assert kl_importance(rho).tolist() == [0.5, 1.0, 2.0]
    assert not kl_importance(rho).requires_grad


def test_the_penalty_of_placement_reward_is_of_the_behaviour_policy():
    behaviour = tensor([[-1.0, -2.0, math.nan]]).requires_grad_()
    penalty = kl_penalty(
        behaviour_logprobs=behaviour, ref_logprobs=tensor([[-1.5, -1.0, 3.0]]), mask=tensor([[1, 1, 0]])
    )
    assert penalty.tolist() == [[0.5, -1.0, 0.0]]
    assert not penalty.requires_grad

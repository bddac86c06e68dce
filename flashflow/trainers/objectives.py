"""What a micro-batch's gradient is taken of: the policy's loss, the critic's, or both where they share a backbone."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from flashflow.algorithms.losses import Denominators, LossResult, Stat, policy_loss, value_loss
from flashflow.algorithms.settings import LossConfig
from flashflow.algorithms.stats import merge_metrics
from flashflow.errors import ContractError
from flashflow.trainers.batch import Consumed, TokenBatch, gradient_rows


class MicroLoss(NamedTuple):
    """Of one micro-batch; those of a step add up."""

    total: torch.Tensor
    """Scalar with gradient."""
    parts: dict[str, torch.Tensor]
    """Name -> scalar, to be reported."""
    metrics: dict[str, Stat]


class Objective(Protocol):
    """One loss of an optimizer step."""

    modules: Sequence[nn.Module]
    """Sharded roots that it runs."""

    def gradient_rows(self) -> Sequence[int]:
        """Places of the rows of the batch that may have a gradient; the other counted ones are only measured."""
        ...

    def __call__(self, batch: TokenBatch, denominators: Denominators) -> MicroLoss: ...


class PolicyObjective:
    """The surrogate with its regularisers."""

    def __init__(self, scorer: nn.Module, config: LossConfig, consumed: Consumed) -> None:
        """scorer: maps tokens and mask as TokenScorer does."""
        self.modules: Sequence[nn.Module] = [scorer]
        self._scorer, self._config, self._consumed = scorer, config, consumed

    def gradient_rows(self) -> Sequence[int]:
        return gradient_rows(self._config, self._consumed)

    def __call__(self, batch: TokenBatch, denominators: Denominators) -> MicroLoss:
        logprobs_BT, entropies_BT = self._scorer(
            batch.tokens_BT, batch.mask_BT, entropy_gradient=self._config.entropy_coefficient > 0
        )
        return self._policy(batch, denominators, logprobs_BT, entropies_BT)

    def _policy(
        self, batch: TokenBatch, denominators: Denominators, logprobs_BT: torch.Tensor, entropies_BT: torch.Tensor
    ) -> MicroLoss:
        consumed = self._consumed
        result = policy_loss(
            self._config,
            logprobs=logprobs_BT,
            prox_logprobs=self._prox(batch, logprobs_BT),
            behaviour_logprobs=batch.behaviour_BT,
            advantages=batch.select(consumed.advantages_NT),
            mask=batch.mask_BT,
            ref_logprobs=None if consumed.reference_NT is None else batch.select(consumed.reference_NT),
            rewards=batch.select(consumed.rewards_N[:, None])[:, 0],
            denominators=denominators,
            entropy=entropies_BT,
            lags=batch.lags_BT,
        )
        return MicroLoss(result.loss, {"loss": result.loss}, result.metrics)

    def _prox(self, batch: TokenBatch, logprobs_BT: torch.Tensor) -> torch.Tensor | None:
        if self._consumed.prox_NT is not None:
            return batch.select(self._consumed.prox_NT)
        # Before the only optimizer step the trainer's own log-probabilities are the current ones.
        return logprobs_BT.detach() if self._consumed.num_updates == 1 else None


class ActorCriticObjective(PolicyObjective):
    """With the value loss of a head on the policy's backbone: L + c L_value (PPO, 1707.06347, eq. 9)."""

    def __init__(
        self, scorer: nn.Module, head: nn.Module, coefficient: float, config: LossConfig, consumed: Consumed
    ) -> None:
        super().__init__(scorer, config, consumed)
        self.modules = [scorer, head]
        self._head, self._coefficient = head, coefficient

    def gradient_rows(self) -> Sequence[int]:
        return self._consumed.counted_rows

    def __call__(self, batch: TokenBatch, denominators: Denominators) -> MicroLoss:
        logprobs_BT, entropies_BT, hidden_BTD = self._scorer(
            batch.tokens_BT, batch.mask_BT, entropy_gradient=self._config.entropy_coefficient > 0, hidden=True
        )
        policy = self._policy(batch, denominators, logprobs_BT, entropies_BT)
        values_BT = self._head(hidden_BTD, batch.mask_BT)
        value = critic_loss(self._config, self._consumed, batch, values_BT, denominators)
        return MicroLoss(
            policy.total + self._coefficient * value.loss,
            {**policy.parts, "value_loss": value.loss},
            merge_metrics([policy.metrics, value.metrics]),
        )


class ValueObjective:
    """The value loss of a critic with a backbone of its own."""

    def __init__(self, critic: nn.Module, config: LossConfig, consumed: Consumed) -> None:
        self.modules: Sequence[nn.Module] = [critic]
        self._critic, self._config, self._consumed = critic, config, consumed

    def gradient_rows(self) -> Sequence[int]:
        return self._consumed.counted_rows

    def __call__(self, batch: TokenBatch, denominators: Denominators) -> MicroLoss:
        values_BT = self._critic(batch.tokens_BT, batch.mask_BT)
        value = critic_loss(self._config, self._consumed, batch, values_BT, denominators)
        return MicroLoss(value.loss, {"value_loss": value.loss}, value.metrics)


def critic_loss(
    config: LossConfig, consumed: Consumed, batch: TokenBatch, values_BT: torch.Tensor, denominators: Denominators
) -> LossResult:
    """Against the returns and the values at consumption. Raises ContractError where there are none."""
    if consumed.values_NT is None or consumed.returns_NT is None:
        raise ContractError("a critic needs the values and returns of the batch: only estimator gae has them")
    return value_loss(
        config,
        values=values_BT,
        old_values=batch.select(consumed.values_NT),
        returns=batch.select(consumed.returns_NT),
        mask=batch.mask_BT,
        denominators=denominators,
    )

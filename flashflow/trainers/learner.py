"""One batch into the weights, in one optimizer step or several.

own rows -> reference, prox, values (forward passes, before the first step) -> advantages (whole batch)
     -> for each epoch, for each part of the groups: passes with gradient -> AdamW of the policy, of the critic
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from flashflow.algorithms.settings import AdvantageConfig, LossConfig, ShapingConfig
from flashflow.algorithms.stats import merge_metrics, summarise
from flashflow.records import ManifestRow
from flashflow.trainers.batch import Consumed, consume, counted_rows
from flashflow.trainers.critic import Critic, ValueHead, explained_variance
from flashflow.trainers.metrics import packing_metrics
from flashflow.trainers.objectives import ActorCriticObjective, Objective, PolicyObjective, ValueObjective
from flashflow.trainers.passes import Passes, StepOutcome, added
from flashflow.trainers.share import split_by_group
from flashflow.trainers.update import Updater


class _Applied(NamedTuple):
    """Of one optimizer step."""

    outcomes: list[StepOutcome]
    figures: dict[str, float]


class Learner:
    """The models of a run, sharded, and how a batch changes them."""

    def __init__(
        self,
        *,
        scorer: nn.Module,
        updater: Updater,
        reference: nn.Module | None,
        critic: Critic | None,
        advantage: AdvantageConfig,
        loss: LossConfig,
        shaping: ShapingConfig,
        optimizer_steps: int,
        epochs: int,
    ) -> None:
        """optimizer_steps: of each of the `epochs` passes over a batch."""
        self._scorer, self._updater, self._reference, self._critic = scorer, updater, reference, critic
        self._advantage, self._loss, self._shaping = advantage, loss, shaping
        self._optimizer_steps, self._epochs = optimizer_steps, epochs

    def learn(self, passes: Passes, rows: Sequence[ManifestRow], step: int) -> dict[str, float]:
        """Trains batch `step` of these rows; returns its metrics, those of several optimizer steps merged: losses,
        gradient norms and learning rates are the means of the steps'."""
        parts = split_by_group(rows, self._optimizer_steps)
        consumed = self._consume(passes, rows, num_updates=len(parts) * self._epochs)
        steps = [self._apply(passes, consumed, part, step) for _ in range(self._epochs) for part in parts]
        outcomes = [outcome for applied in steps for outcome in applied.outcomes]
        metrics = summarise(merge_metrics(outcome.metrics for outcome in outcomes))
        sums = added([*(applied.figures for applied in steps), *(outcome.losses for outcome in outcomes)])
        return {
            "clip_fraction": 0.0,  # stays for a surrogate that clips nothing
            **metrics,
            **{name: total / len(steps) for name, total in sums.items()},
            **self._counts(passes, consumed),
            **packing_metrics([micro for applied in steps for micro in applied.outcomes[0].plan], passes.share.lengths),
            "optimizer_steps": float(len(steps)),
        }

    def _counts(self, passes: Passes, consumed: Consumed) -> dict[str, float]:
        counts = {
            "tokens_trained": float(consumed.num_tokens),
            "empty_batch": float(consumed.num_tokens == 0),
            "skipped_steps": float(self._updater.skipped_total),
        }
        if self._critic is not None and consumed.values_NT is not None and consumed.returns_NT is not None:
            counts["critic_skipped_steps"] = float(self._critic.updater.skipped_total)
            counts["explained_variance"] = explained_variance(
                consumed.values_NT.cpu(), consumed.returns_NT, consumed.mask_NT, passes.total
            )
        return counts

    def _consume(self, passes: Passes, rows: Sequence[ManifestRow], num_updates: int) -> Consumed:
        """All that must be known of the batch before its first optimizer step changes the weights."""
        counted = counted_rows(rows, self._shaping)
        return consume(
            rows,
            passes.share,
            self._advantage,
            self._loss,
            total=passes.total,
            shaping=self._shaping,
            num_updates=num_updates,
            reference_NT=None if self._reference is None else self.logprobs(passes, self._reference, counted),
            prox_NT=self.logprobs(passes, self._scorer, counted) if num_updates > 1 and self._loss.needs_prox else None,
            values_NT=None if self._critic is None else self._values(passes, self._critic, counted),
        )

    def logprobs(self, passes: Passes, scorer: nn.Module, rows: Sequence[int]) -> torch.Tensor:
        """[N, longest row] of this rank's at the sampling temperature, no gradient; 0 outside the mask and for rows
        whose places are not named."""
        return passes.score(lambda batch: scorer(batch.tokens_BT, batch.mask_BT)[0], rows, scorer)

    def _values(self, passes: Passes, critic: Critic, rows: Sequence[int]) -> torch.Tensor:
        module, scorer = critic.module, self._scorer
        if not isinstance(module, ValueHead):
            return passes.score(lambda batch: module(batch.tokens_BT, batch.mask_BT), rows, module)
        return passes.score(
            lambda batch: module(scorer(batch.tokens_BT, batch.mask_BT, hidden=True)[2], batch.mask_BT),
            rows,
            scorer,
            module,
        )

    def _apply(self, passes: Passes, consumed: Consumed, part: Sequence[int], step: int) -> _Applied:
        """One optimizer step on the rows at the places `part`."""
        counted = set(consumed.counted_rows)
        rows, denominators = [row for row in part if row in counted], consumed.denominators(part)
        outcomes = [passes.train(objective, rows, denominators) for objective in self._objectives(consumed)]
        norm, rate = self._updater.apply(step)
        figures = {"loss": 0.0, "grad_norm": norm, "learning_rate": rate}
        if self._critic is not None:
            norm, rate = self._critic.updater.apply(step)
            figures |= {"value_loss": 0.0, "critic_grad_norm": norm, "critic_learning_rate": rate}
        return _Applied(outcomes, figures)

    def _objectives(self, consumed: Consumed) -> list[Objective]:
        critic = self._critic
        if critic is None:
            return [PolicyObjective(self._scorer, self._loss, consumed)]
        if isinstance(critic.module, ValueHead):
            return [ActorCriticObjective(self._scorer, critic.module, critic.loss_coefficient, self._loss, consumed)]
        return [
            PolicyObjective(self._scorer, self._loss, consumed),
            ValueObjective(critic.module, self._loss, consumed),
        ]

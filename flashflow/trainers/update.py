"""One AdamW update from accumulated gradients: clipped, scheduled, and skipped when the gradient is not finite."""

import math

import torch
from torch import nn

from flashflow.config.sections import OptimizerSection
from flashflow.errors import BudgetError
from flashflow.trainers.schedule import learning_rate
from flashflow.trainers.sharding import full


class Updater:
    """AdamW (Loshchilov and Hutter, 1711.05101) over the parameters of one module, sharded or not."""

    def __init__(
        self, module: nn.Module, section: OptimizerSection, num_steps: int, *, name: str = "optimizer"
    ) -> None:
        """num_steps: batches of the run. name: of the section, for messages."""
        self._section, self._num_steps, self._name = section, num_steps, name
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
            weight_decay=section.weight_decay,
            foreach=True,
        )
        self._start_moments()
        self.skipped_in_row = 0
        self.skipped_total = 0

    def apply(self, step: int) -> tuple[float, float]:
        """Uses up the gradients. step: of the batch, from 1. Returns (gradient norm before clipping, learning rate).

        A gradient that is not finite leaves weights and moments untouched and is counted; raises BudgetError past
        `max_skipped_steps` in a row.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                # No pass reached it: a gradient of 0 and not none, so that moments and decay take their step.
                parameter.grad = torch.zeros_like(parameter)
        rate = learning_rate(self._section, step, self._num_steps)
        norm = float(full(nn.utils.clip_grad_norm_(self._parameters, self._section.clip_norm, foreach=True)))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.skipped_in_row = 0
        else:
            self._skip(step)
        self.optimizer.zero_grad(set_to_none=True)
        return norm, rate

    def restore(self, skipped_in_row: int, skipped_total: int) -> None:
        """After a checkpoint was loaded into `optimizer`: the counts, and this run's options over the checkpoint's."""
        self.skipped_in_row, self.skipped_total = skipped_in_row, skipped_total
        section = self._section
        for group in self.optimizer.param_groups:
            group.update(lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay)

    def _start_moments(self) -> None:
        # Left to itself AdamW makes them at its first step, and torch's state-dict functions take a step of their own
        # where there are none yet, which counts: a checkpoint before the first step would then change the run.
        for parameter in self._parameters:
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }

    def _skip(self, step: int) -> None:
        self.skipped_in_row += 1
        self.skipped_total += 1
        if self.skipped_in_row > self._section.max_skipped_steps:
            self.optimizer.zero_grad(set_to_none=True)
            raise BudgetError(
                f"step {step}: the gradient was not finite {self.skipped_in_row} times in a row "
                f"({self._name}.max_skipped_steps: {self._section.max_skipped_steps}); lower {self._name}.lr, "
                "or look for diverging log-probabilities in the metrics"
            )

"""The learning rate, a pure function of the batch: nothing to save, nothing to restore."""

import math

from flashflow.config.sections import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, num_steps: int) -> float:
    """Of batch `step`, from 1 to `num_steps`; all optimizer steps of a batch have the same.

    Warm-up rises linearly, step / warmup_steps of `lr`, and reaches it at step `warmup_steps`. From there `decay` leads
    down to `min_lr_fraction` of it at the last step; steps beyond stay there.
    """
    if step < section.warmup_steps:
        return section.lr * step / section.warmup_steps
    top = max(section.warmup_steps, 1)
    progress = min(1.0, (step - top) / max(1, num_steps - top))
    match section.decay:
        case "constant":
            fraction = 1.0
        case "linear":
            fraction = 1.0 - (1.0 - section.min_lr_fraction) * progress
        case "cosine":
            half = 0.5 * (1.0 + math.cos(math.pi * progress))
            fraction = section.min_lr_fraction + (1.0 - section.min_lr_fraction) * half
    return section.lr * fraction

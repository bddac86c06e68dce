"""What becomes of long responses: in the reward that the advantage is made of, or out of the loss. Knows no torch."""

from flashflow.algorithms.rewards import overlong_penalty
from flashflow.algorithms.settings import ShapingConfig
from flashflow.records import ManifestRow
from flashflow.trainers.scorable import is_scorable


def is_trained(row: ManifestRow, shaping: ShapingConfig) -> bool:
    """It is scorable, and not masked as truncated, in which case only its reward counts, in the group's baseline."""
    return is_scorable(row) and not (shaping.mask_truncated and row.outcome == "truncated")


def shaped_reward(row: ManifestRow, shaping: ShapingConfig) -> float | None:
    """What the advantage is made of: the raw task reward and the overlong penalty of the tokens sampled."""
    if row.reward is None or shaping.budget is None:
        return row.reward
    return row.reward + overlong_penalty(row.num_sampled, budget=shaping.budget, cache=shaping.cache)

"""Asynchronous reinforcement-learning post-training of language models.

`reward` and `environment` mark what a user writes; importing them imports neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashflow.environments.base import environment as environment
    from flashflow.rewards.base import reward as reward

__all__ = ["environment", "reward"]


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import flashflow` costs nothing in the processes of the fleet."""
    match name:
        case "reward":
            from flashflow.rewards.base import reward

            return reward
        case "environment":
            from flashflow.environments.base import environment

            return environment
    raise AttributeError(f"module 'flashflow' has no attribute {name!r}")

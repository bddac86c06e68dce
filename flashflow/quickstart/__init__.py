"""The builtin model `builtin:quickstart`: a tiny Qwen3 that half knows how to add, made on first use.

It has been shown worked column arithmetic, and, later and more often, guesses. So it starts by guessing, and
reinforcement learning on exact answers has a skill to bring out and to repair.
"""

from collections.abc import Callable
from pathlib import Path

MODEL_NAME = "builtin:quickstart"

Progress = Callable[[int, int, float], None]
"""Called as (steps done, steps in all, loss in nats per token)."""


def ensure_model(cache: Path, seed: int = 0, progress: Progress | None = None) -> Path:
    """Folder of the model in `cache`, made there (a minute on one core) unless it is there already.

    The folder's name is a hash of the recipe and the seed. It appears whole or not at all, also when several
    processes make it at once.
    """
    from flashflow.quickstart.recipe import Recipe, cached_folder

    folder = cached_folder(cache, Recipe(), seed)
    if not folder.exists():
        from flashflow.quickstart.warm_start import make_model

        make_model(folder, Recipe(), seed, progress)
    return folder

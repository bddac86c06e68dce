"""What an environment is: gymnasium's words, in text.

One object is one attempt at a time: `reset`, then `step` with each turn of the policy until it terminates or is
truncated. Methods are async or plain.
"""

import inspect
from typing import Any, Protocol, TypeVar

EnvironmentT = TypeVar("EnvironmentT", bound=type)

Observation = str | list[dict[str, Any]]
"""What the policy sees next: the text of a user turn, or chat messages."""

StepResult = tuple[Observation, float | None, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info); the reward None means: cannot be scored."""

MARK = "__flashflow_environment__"


class Environment(Protocol):
    async def reset(self, *, seed: int, **row: Any) -> Observation:
        """Start an attempt at the task `row` (its columns); `seed` is the same for all members of a group."""
        ...

    async def step(self, action: str) -> StepResult:
        """`action` is the decoded text of the policy's turn. The observation of a last step is not shown to anyone."""
        ...


def environment(cls: EnvironmentT) -> EnvironmentT:
    """Decorator: marks an environment class and checks where it is written that it can be driven as one.

    Raises TypeError naming what is missing.
    """
    if not inspect.isclass(cls):
        raise TypeError(f"@environment goes on a class, not on a {type(cls).__name__}")
    for method, parameter in (("reset", "seed"), ("step", None)):
        found = getattr(cls, method, None)
        if not callable(found):
            raise TypeError(f"environment {cls.__qualname__} has no method {method}")
        if parameter is not None and not _takes(found, parameter):
            raise TypeError(f"environment {cls.__qualname__}: {method} takes no keyword {parameter!r}, nor **row")
    setattr(cls, MARK, True)
    return cls


def _takes(method: Any, parameter: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(p.name == parameter or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

"""What a reward function is, and how one is called.

Two forms, told apart by their parameters:
    f(completion, [prompt], [columns of the row], [arguments])     -> float | None | dict of components with `reward`
    f(completions, [prompts], [columns of the rows], [arguments])  -> list of float | None, as TRL has it
Either may be async. A function gets the parameters it declares; with `**row` it gets all there are.
"""

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from flashflow.errors import ConfigError, RewardError

Function = Callable[..., Any]
FunctionT = TypeVar("FunctionT", bound=Function)

MARK = "__flashflow_reward__"
BATCHED = "completions"
SINGLE = "completion"
RESERVED = frozenset({"prompt", "completion", "prompts", "completions"})
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Scored(NamedTuple):
    """What a reward function said of one completion."""

    reward: float | None
    """Finite; None: this completion cannot be scored."""
    components: dict[str, float]


def reward(function: FunctionT) -> FunctionT:
    """Decorator: marks a reward function and checks its parameters where it is written. It stays callable as it is."""
    RewardFunction(function, {}, name=getattr(function, "__qualname__", repr(function)))
    setattr(function, MARK, True)
    return function


class RewardFunction:
    """A reward function with its arguments. Raises ConfigError when it cannot be called as one."""

    def __init__(self, function: Function, arguments: Mapping[str, Any], *, name: str) -> None:
        self.name = name
        self.asynchronous = _is_async(function)
        self._function = function
        self._arguments = dict(arguments)
        parameters = _parameters(function, name)
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters if p.kind in NAMED}
        self._required = {p.name for p in parameters if p.kind in NAMED and p.default is inspect.Parameter.empty}
        self._batched = BATCHED in self._names and SINGLE not in self._names
        self._check()

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """A sync function runs in a thread. Raises RewardError with the traceback, or naming an unusable value."""
        if not self.asynchronous:
            return await asyncio.to_thread(self.score_now, prompt, completion, row)
        keywords = self._bind(prompt, completion, row)
        try:
            value = await self._function(**keywords)
        except Exception as error:
            raise RewardError(traceback.format_exc()) from error
        return self._interpret(value)

    def score_now(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """As `score`, in the caller's thread; for sync functions only."""
        keywords = self._bind(prompt, completion, row)
        try:
            value = self._function(**keywords)
        except (Exception, SystemExit) as error:
            raise RewardError(traceback.format_exc()) from error
        return self._interpret(value)

    def _check(self) -> None:
        where = f"reward.function {self.name}"
        if not (self._takes_all or self._names & {SINGLE, BATCHED}):
            has = ", ".join(sorted(self._names)) or "none"
            raise ConfigError([f"{where}: no parameter `completion` (or `completions`, or **row); it has: {has}"])
        mistakes = [
            f"{where}: reward.arguments.{name} is set by flashflow" for name in RESERVED & self._arguments.keys()
        ]
        if not self._takes_all:
            unknown = sorted(self._arguments.keys() - self._names - RESERVED)
            mistakes += [f"{where}: reward.arguments.{name}: it has no such parameter" for name in unknown]
        if mistakes:
            raise ConfigError(sorted(mistakes))

    def _bind(self, prompt: str, completion: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments. Of equal names the arguments of the config go before the columns of the row."""
        offered = self._batch_of_one(prompt, completion, row) if self._batched else {**row}
        if not self._batched:
            offered |= {"prompt": prompt, "completion": completion}
        offered |= self._arguments
        if missing := sorted(self._required - offered.keys()):
            columns = ", ".join(sorted(row)) or "none"
            raise RewardError(f"{self.name} needs {', '.join(missing)}; the columns of the row are {columns}")
        if self._takes_all:
            return offered
        return {name: value for name, value in offered.items() if name in self._names}

    def _batch_of_one(self, prompt: str, completion: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """TRL's form: every column a list, and messages where the dataset's prompts are messages."""
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        if isinstance(row.get("prompt"), list):
            answer = [{"role": "assistant", "content": completion}]
            return {**columns, "prompts": [row["prompt"]], "completions": [answer]}
        return {**columns, "prompts": [prompt], "completions": [completion]}

    def _interpret(self, value: Any) -> Scored:
        if self._batched:
            if not isinstance(value, list | tuple) or len(value) != 1:
                raise RewardError(f"{self.name} returned {_show(value)} for 1 completion; expected a list of 1 reward")
            value = value[0]
        if not isinstance(value, Mapping):
            return Scored(self._number("the reward", value), {})
        if "reward" not in value:
            raise RewardError(f"{self.name} returned {_show(value)}; a dict of components needs the key `reward`")
        components = {str(key): self._number(f"component {key!r}", item) for key, item in value.items()}
        reward = components.pop("reward")
        return Scored(reward, {key: item for key, item in components.items() if item is not None})

    def _number(self, what: str, value: Any) -> float | None:
        if value is None:
            return None
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(f"{self.name}: {what} is {_show(value)}; expected a finite number or None")
        return float(value)


def _is_async(function: Function) -> bool:
    """True also for an instance whose `__call__` is async."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _parameters(function: Function, name: str) -> list[inspect.Parameter]:
    if inspect.isclass(function) or not callable(function):
        raise ConfigError([f"reward.function {name} is a {type(function).__name__}, not a function"])
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError([f"reward.function {name}: {parameter.name} is positional-only; it is passed by keyword"])
    return parameters


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:200] + '...'} ({type(value).__name__})"

"""What an inference engine must offer. Synchronous; one thread calls everything."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

from flashflow.messages import Generate

if TYPE_CHECKING:
    import torch

FinishReason = Literal["", "stop", "length", "aborted"]


class Sampled(NamedTuple):
    """One sampled token of one request; or, with token -1, only the news that the request ended (aborted)."""

    request: str
    token: int
    logprob: float
    """log-probability at the sampling temperature."""
    version: int
    finish_reason: FinishReason


class EngineLimits(msgspec.Struct, frozen=True):
    slots: int
    max_context_tokens: int


class Engine(Protocol):
    """Continuous batching: a request joins and leaves between any two steps."""

    @property
    def version(self) -> int:
        """Of the weights in use; -1 before the first load."""
        ...

    @property
    def exact(self) -> bool:
        """Samples are independent of batch mates to the last bit."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def submit(self, request: Generate) -> None:
        """Queue a request; raises ContractError when prompt + max_new_tokens exceed the context limit."""
        ...

    def abort(self, request: str) -> None:
        """End a request before the next decode step; unknown ids are ignored."""
        ...

    def step(self) -> list[Sampled]:
        """Admit what fits, run one decode step, return what was sampled; [] when idle."""
        ...

    def load(self, version: int, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """Swap the weights whole; called between two steps. The tensors may be kept (views of shared memory).

        Raises WeightsError on a missing, unknown or misshapen name, and changes nothing then.
        """
        ...

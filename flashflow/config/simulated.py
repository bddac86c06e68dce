"""Sections of the simulated parts: what stands in for a model, its trainer, its tasks and its environment.

They run in real processes on the machine's clock, and on the virtual one of `flashflow simulate`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from flashflow.config.base import Section


class FixedDistribution(Section):
    """Always the same."""

    kind: Literal["fixed"] = "fixed"
    value: NonNegativeFloat
    """The value."""


class NormalDistribution(Section):
    """Normal, with 0 for what would be negative."""

    kind: Literal["normal"] = "normal"
    mean: float
    """Before what is negative becomes 0."""
    sigma: NonNegativeFloat
    """Standard deviation."""


class LognormalDistribution(Section):
    """Lognormal, cut off at `cap`: the long tail of answers."""

    kind: Literal["lognormal"] = "lognormal"
    median: PositiveFloat
    """Half of the draws are above."""
    sigma: NonNegativeFloat
    """Standard deviation of the logarithm."""
    cap: PositiveFloat | None = None
    """What is drawn above becomes it. null: no cap."""


class EmpiricalDistribution(Section):
    """Each line of a file with the same probability."""

    kind: Literal["empirical"] = "empirical"
    path: Path
    """Text file with one number on each line."""


class GivenDistribution(Section):
    """Attempt by attempt: member m of group g has value number g x rollout.group_size + m, round and round."""

    kind: Literal["given"] = "given"
    values: list[NonNegativeFloat] = Field(min_length=1)
    """Numbers."""


Distribution = Annotated[
    FixedDistribution | NormalDistribution | LognormalDistribution | EmpiricalDistribution | GivenDistribution,
    Field(discriminator="kind"),
]


class SimulatedEngineSection(Section):
    """An engine that samples nothing: each answer has a length drawn by its sampling key and takes the time it would.
    """  # fmt: skip

    kind: Literal["simulated"] = "simulated"
    slots: PositiveInt = 32
    """Requests decoded together."""
    max_context_tokens: PositiveInt = 32_768
    """Prompt and answers of one attempt together."""
    answer_tokens: Distribution = LognormalDistribution(median=512, sigma=1.0)
    """Length of an answer; never above sampling.max_new_tokens, at which it is truncated."""
    prefill_tokens_per_s: NonNegativeFloat = 0.0
    """Prompt tokens a request reads in a second; 0: reading takes no time."""
    decode_tokens_per_s: NonNegativeFloat = 0.0
    """Tokens each slot samples in a second; 0: sampling takes no time."""
    update_s: NonNegativeFloat = 0.0
    """Decoding stands still so long while new weights are taken over."""
    stream_every_s: PositiveFloat | None = None
    """Sampled tokens are handed on so often; null: whole answers only."""


class SimulatedTrainerSection(Section):
    """A trainer that changes no weight: it fetches its rows, waits as long as training would take, and stages a few
    bytes."""

    kind: Literal["simulated"] = "simulated"
    seconds_per_token: NonNegativeFloat = 0.0
    """Of one device, for a token of the batch, prompts included."""
    devices: PositiveInt = 1
    """Share the tokens of a batch."""
    fixed_s: NonNegativeFloat = 0.0
    """Of every batch, whatever its size."""
    stage_s: NonNegativeFloat = 0.0
    """Staging the weights."""


class SimulatedData(Section):
    """Tasks that ask nothing: prompts of a drawn length."""

    kind: Literal["simulated"] = "simulated"
    size: PositiveInt = 1_000_000
    """Tasks of one pass; there are always as many held-out ones as an evaluation asks for."""
    prompt_tokens: Distribution = FixedDistribution(value=256)
    """Length of a prompt, at least 1; the same for all members of a group."""


class SimulateSection(Section):
    """What stands in for environments where engine and trainer are simulated, and how `flashflow simulate` runs."""

    turns: Distribution = FixedDistribution(value=1)
    """Answers of one attempt, at least 1."""
    observation_tokens: Distribution = FixedDistribution(value=0)
    """Tokens that the environment adds between two answers."""
    reset_s: Distribution = FixedDistribution(value=0)
    """Seconds until an environment has started."""
    step_s: Distribution = FixedDistribution(value=0)
    """Seconds an environment takes over each answer."""
    crash_rate: float = Field(0.0, ge=0, le=1)
    """Share of steps of environments that crash; the attempt is tried again (rollout.max_attempts)."""
    hang_rate: float = Field(0.0, ge=0, le=1)
    """Share of steps of environments that never end; rollout.turn_deadline_s ends them."""
    message_s: NonNegativeFloat = 0.0
    """`flashflow simulate` only: time a message between two roles takes."""
    trace_spans: NonNegativeInt = 100_000
    """`flashflow simulate` only: so many spans at most are written into trace.json, the first ones."""

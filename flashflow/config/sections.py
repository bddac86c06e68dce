"""One frozen section per component. A component receives its own section, never the whole config."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSection(Section):
    """What the run is called and how it is executed."""

    name: str = Field("run", min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    folder: Path = Path("runs")
    """The run folder is `folder/name`."""
    seed: NonNegativeInt = 0
    steps: PositiveInt = 100
    """Batches to train."""
    runtime: Literal["processes", "in_process"] = "processes"


class ModelSection(Section):
    path: str
    """Folder of a Hugging Face model, a hub name, or `builtin:quickstart` (made on first use, cached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cache: Path = Path(".cache/flashflow")
    """Where builtin models are kept."""


class ReasoningGymData(Section):
    """A reasoning-gym task by name; needs the package reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    options: dict[str, Any] = {}
    """Passed to reasoning_gym.create_dataset."""
    size: PositiveInt = 20_000
    """Problems generated; the held-out fifth is split off by a hash of the question."""


class JsonlData(Section):
    kind: Literal["jsonl"] = "jsonl"
    path: Path
    eval_path: Path | None = None


class ParquetData(Section):
    kind: Literal["parquet"] = "parquet"
    path: Path
    eval_path: Path | None = None


class HuggingFaceData(Section):
    """Hugging Face `datasets`, by hub name or from a folder of save_to_disk."""

    kind: Literal["datasets"] = "datasets"
    path: str
    name: str | None = None
    split: str = "train"
    eval_split: str | None = None


Source = Annotated[ReasoningGymData | JsonlData | ParquetData | HuggingFaceData, Field(discriminator="kind")]


class DataSection(Section):
    source: Source
    prompt_column: str = "prompt"
    """Column with a string, or a list of chat messages. reasoning_gym rows have `prompt` and `answer`."""
    system_prompt: str | None = None
    shuffle: bool = True
    epochs: PositiveInt | None = None
    """Passes over the data; None: endless. The run ends cleanly when they are used up."""


class RewardSection(Section):
    function: str
    """`module:function` or `file.py:function`."""
    arguments: dict[str, Any] = {}
    """Extra keyword arguments."""
    deadline_s: PositiveFloat = 30.0


class SamplingSection(Section):
    max_new_tokens: PositiveInt = 512
    temperature: PositiveFloat = 1.0
    stop_strings: list[str] = []


class RolloutSection(Section):
    """Scheduling of rollout (contracts 1-3)."""

    group_size: PositiveInt = 8
    alpha: NonNegativeFloat = 1.0
    """Async ratio: bounds every sample's staleness; 0 is synchronous."""
    on_stale: Literal["wait", "drop"] = "wait"
    concurrency: PositiveInt = 64
    """Attempts one env process runs at once."""
    max_attempts: PositiveInt = 3
    """Tries of one sample when its environment breaks."""
    trajectory_deadline_s: PositiveFloat = 600.0
    turn_deadline_s: PositiveFloat = 300.0
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """Share of failed samples in a batch past which the run stops."""


class BatchSection(Section):
    groups: PositiveInt = 32
    """Groups per batch; samples = groups x rollout.group_size."""
    micro_batch_tokens: PositiveInt = 16_384
    """Padded tokens one forward pass may hold (a longer single sequence goes alone)."""


class OptimizerSection(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, down to `min_lr_fraction` at the last step."""
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    max_skipped_steps: NonNegativeInt = 3
    """Non-finite gradients in a row that are skipped before the run stops."""


class AlgorithmSection(BaseModel):
    """`preset` and overrides of any field of AdvantageConfig or LossConfig; resolved by algorithms.presets.resolve."""

    model_config = ConfigDict(frozen=True, extra="allow")
    preset: str = "grpo"


class TorchEngineSection(Section):
    """The embedded engine."""

    kind: Literal["torch"] = "torch"
    slots: int = Field(32, ge=8, multiple_of=8)
    """Requests decoded together, a multiple of 8."""
    max_context_tokens: PositiveInt = 2048
    batch_invariant: bool = False
    """Refuse to start unless samples are independent of their batch mates to the last bit."""
    stream_every_s: PositiveFloat = 0.1


EngineSection = TorchEngineSection


class WeightsSection(Section):
    carrier: Literal["auto", "shared_memory"] = "auto"
    sync: Literal["overlapped", "blocking"] = "overlapped"
    deadline_s: PositiveFloat = 60.0


class EvalSection(Section):
    every_steps: NonNegativeInt = 0
    """0: never. Otherwise before the first, after every n-th and after the last step."""
    problems: PositiveInt = 512
    max_new_tokens: PositiveInt | None = None
    """None: rollout's."""
    deadline_s: PositiveFloat = 600.0


class CheckpointSection(Section):
    every_steps: NonNegativeInt = 20
    """0: only at the end."""
    keep: PositiveInt = 2


class JournalSection(Section):
    fsync_s: PositiveFloat = 1.0
    segment_bytes: PositiveInt = 64 * 1024 * 1024


class NetworkSection(Section):
    interface: str = "127.0.0.1"
    heartbeat_s: PositiveFloat = 1.0
    peer_deadline_s: PositiveFloat = 10.0
    """Silence after which a peer counts as dead."""
    call_deadline_s: PositiveFloat = 60.0
    long_poll_s: PositiveFloat = 5.0
    startup_deadline_s: PositiveFloat = 180.0
    shutdown_deadline_s: PositiveFloat = 8.0
    train_step_deadline_s: PositiveFloat = 600.0
    stall_report_s: PositiveFloat = 60.0
    """Without progress for so long, the watchdog says why."""


class PlacementSection(Section):
    """Processes per role."""

    mode: Literal["separate"] = "separate"
    trainer: Literal[1] = 1
    engine: PositiveInt = 1
    env: PositiveInt = 1
    reward: PositiveInt = 1
    threads: PositiveInt = 1
    """torch threads of each engine and trainer process."""
    max_restarts: NonNegativeInt = 3
    """Restarts of any one process of the fleet."""


class Config(Section):
    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    reward: RewardSection
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    batch: BatchSection = BatchSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    engine: EngineSection = TorchEngineSection()
    weights: WeightsSection = WeightsSection()
    evaluation: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    journal: JournalSection = JournalSection()
    network: NetworkSection = NetworkSection()
    placement: PlacementSection = PlacementSection()

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def samples_per_batch(self) -> int:
        return self.batch.groups * self.rollout.group_size

    @property
    def max_staleness(self) -> int:
        return math.ceil(self.rollout.alpha)

    @property
    def max_groups_in_flight(self) -> int:
        """floor((1 + alpha) x groups): waiting, running and training together."""
        return math.floor((1 + self.rollout.alpha) * self.batch.groups)

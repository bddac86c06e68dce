"""One frozen section per component. A component receives its own section, never the whole config."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from flashflow.algorithms.presets import DYNAMIC_SAMPLING, OVERLONG_PENALTY
from flashflow.algorithms.settings import FilterConfig, ReplayConfig, ShapingConfig
from flashflow.config.base import Section
from flashflow.config.simulated import (
    SimulatedData,
    SimulatedEngineSection,
    SimulatedTrainerSection,
    SimulateSection,
)

DecayRate = Annotated[float, Field(ge=0, lt=1)]


CACHE_SHARE = 5
"""The overlong cache is one part in so many of the budget unless it is given."""


class RunSection(Section):
    """What the run is called and how it is executed."""

    name: str = Field("run", min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Letters, digits, dots, dashes and underscores."""
    folder: Path = Path("runs")
    """The run folder is `folder/name`."""
    seed: NonNegativeInt = 0
    """Keys the order of the data, every sampled token and the training."""
    steps: PositiveInt = 100
    """Batches to train."""
    runtime: Literal["processes", "in_process"] = "processes"
    """`in_process` runs every role in one process: for tests and the debugger."""


class ModelSection(Section):
    """The policy that is trained."""

    path: str = ""
    """Folder of a Hugging Face model, a hub name, `builtin:quickstart` or `builtin:smollm2-135m` (docs/models.md);
    needed unless engine and trainer are simulated."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, in engines and trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is one."""
    cache: Path = Path(".cache/flashflow")
    """Where builtin models are kept."""


class ReasoningGymData(Section):
    """A reasoning-gym task by name; needs the package reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the task, e.g. `chain_sum`."""
    options: dict[str, Any] = {}
    """Passed to reasoning_gym.create_dataset."""
    size: PositiveInt = 20_000
    """Problems generated; the held-out fifth is split off by a hash of the question."""


class JsonlData(Section):
    """A JSONL file."""

    kind: Literal["jsonl"] = "jsonl"
    path: Path
    """File with one JSON object per line."""
    eval_path: Path | None = None
    """File of held-out problems; needed to evaluate."""


class ParquetData(Section):
    """A Parquet file."""

    kind: Literal["parquet"] = "parquet"
    path: Path
    """Parquet file."""
    eval_path: Path | None = None
    """File of held-out problems; needed to evaluate."""


class HuggingFaceData(Section):
    """Hugging Face `datasets`, by hub name or from a folder of save_to_disk."""

    kind: Literal["datasets"] = "datasets"
    path: str
    """Hub name, or a folder of save_to_disk."""
    name: str | None = None
    """Configuration of the hub data set."""
    split: str = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split of held-out problems; needed to evaluate."""


Source = Annotated[
    ReasoningGymData | JsonlData | ParquetData | HuggingFaceData | SimulatedData, Field(discriminator="kind")
]


class DataSection(Section):
    """The tasks."""

    source: Source
    """Where the problems come from."""
    prompt_column: str = "prompt"
    """Column with a string, or a list of chat messages. reasoning_gym rows have `prompt` and `answer`."""
    system_prompt: str | None = None
    """Put before every prompt as a system message."""
    shuffle: bool = True
    """A new order for every pass over the data; false keeps the order of the file."""
    epochs: PositiveInt | None = None
    """Passes over the data; None: endless. The run ends cleanly when they are used up."""


class RewardSection(Section):
    """What scores a finished attempt."""

    function: str
    """`module:function` or `file.py:function`."""
    arguments: dict[str, Any] = {}
    """Extra keyword arguments."""
    deadline_s: PositiveFloat = 30.0
    """Scoring one attempt may take so long; past it the attempt has failed."""


class SamplingSection(Section):
    """How the policy is sampled in training."""

    max_new_tokens: PositiveInt = 512
    """Tokens sampled per turn at most."""
    temperature: PositiveFloat = 1.0
    """Of sampling and of every log-probability in the loss."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1 only: a truncated distribution has other log-probabilities than the trainer's, so less is refused."""
    stop_strings: list[str] = []
    """End a turn as the model's end token does."""


Schedule = Literal["async", "sync_queue", "sync_naive"]


class RolloutSection(Section):
    """Scheduling of rollout (contracts 1-3)."""

    group_size: PositiveInt = 8
    """Attempts at one task, compared with each other."""
    alpha: NonNegativeFloat = 1.0
    """Async ratio: bounds every sample's staleness; 0 is synchronous."""
    schedule: Schedule = "async"
    """`sync_queue`: attempts overlap within a step, nothing does across steps (alpha 0). `sync_naive`: moreover a batch
    is generated whole before any of it is scored. Both are baselines to measure `async` against."""
    replicate_prompts: bool = True
    """true: the members of a group are requests of their own, each to the engine with the least to do. false: they go
    to one engine together, as one request for several samples does, and the group takes as long as that engine."""
    on_stale: Literal["wait", "drop"] = "wait"
    """`wait`: the trainer waits for a group that would otherwise grow too old. `drop`: it expires and is replaced."""
    concurrency: PositiveInt = 64
    """Attempts one env process runs at once."""
    max_attempts: PositiveInt = 3
    """Tries of one sample when its environment breaks."""
    trajectory_deadline_s: PositiveFloat = 600.0
    """One attempt, every turn and its scoring included."""
    turn_deadline_s: PositiveFloat = 300.0
    """One answer of the model, or one step of the environment."""
    redundant_groups: NonNegativeInt = 0
    """Groups started beyond what alpha admits; the first to finish make the batch, a late one is kept while a later
    batch may take it (never at alpha 0) and aborted then."""
    redundant_members: NonNegativeInt = 0
    """Attempts started per group beyond group_size; the first group_size with a reward win, the rest are aborted."""
    straggler_deadline_s: PositiveFloat | None = None
    """A group not complete so long after its first attempt began is aborted, and its task begun anew, `max_attempts`
    times at most in all; the time in which engines take over weights does not count. null: none."""
    min_members: PositiveInt | None = None
    """Rewards that are enough at straggler_deadline_s for a group to be trained as it is. null: group_size."""
    failures: Literal["mask", "filter"] = "mask"
    """A sample without reward. `mask`: it stays in its group, untrained and out of the baseline. `filter`: it is tried
    again as a broken environment is, and a group that lost a member for good is replaced whole."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """Share past which the run stops: under `mask` of failed samples in a batch; of groups that ended without any
    reward, or at straggler_deadline_s, since the last batch, of these and the complete ones that wait, which count as a
    batch at least; under `filter` of groups replaced, with 16 at least."""


class BatchSection(Section):
    """What one step trains on."""

    groups: PositiveInt = 32
    """Groups per batch; samples = groups x rollout.group_size."""
    micro_batch_tokens: PositiveInt = 16_384
    """Padded tokens one forward pass may hold (a longer single sequence goes alone)."""
    optimizer_steps: PositiveInt = 1
    """Optimizer steps the batch is split into, group by group; the version rises by 1 per batch all the same."""
    epochs: PositiveInt = 1
    """Passes over the batch, each of `optimizer_steps`."""


class OptimizerSection(Section):
    """AdamW. Its schedule counts batches, whatever `batch.optimizer_steps` and `batch.epochs`."""

    lr: NonNegativeFloat = 1e-6
    """Learning rate after the warm-up; 0 leaves the weights as they are."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled, per step and unit of learning rate."""
    clip_norm: PositiveFloat = 1.0
    """Greatest norm of the whole gradient."""
    warmup_steps: NonNegativeInt = 0
    """Batches of a linear rise of the learning rate."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, down to `min_lr_fraction` at the last batch."""
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """Of `lr`, reached at the end of the decay."""
    max_skipped_steps: NonNegativeInt = 3
    """Non-finite gradients in a row that are skipped before the run stops."""


class AlgorithmSection(BaseModel):
    """`preset` and overrides of any field of AdvantageConfig or LossConfig; resolved by algorithms.presets.resolve."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    preset: str = "grpo"
    """A name of algorithms.presets.PRESETS."""


class CriticSection(OptimizerSection):
    """The critic of `algorithm.estimator: gae`, with an AdamW of its own; left out, it has these defaults."""

    kind: Literal["value_head", "model"] = "value_head"
    """`value_head`: a linear head on the policy's backbone. `model`: a backbone of its own as well."""
    path: str | None = None
    """model: folder or hub name of the model it starts from; null: the policy's."""
    loss_coefficient: PositiveFloat = 0.1
    """value_head: of the value loss, whose gradient reaches the policy's backbone (PPO's c1)."""
    lr: NonNegativeFloat = 1e-5
    """Learning rate after the warm-up."""


ALL_LINEAR = "all-linear"


class LoraSection(Section):
    """Low-rank adapters (LoRA, 2106.09685), trained in place of the weights, which stay as they are; engines are given
    the merged weights W + alpha / rank x B A. Left out, all weights are trained. Needs peft (docs/lora.md)."""

    rank: PositiveInt = 16
    """Columns of B and rows of A."""
    alpha: PositiveInt = 32
    """Over `rank` it scales the adapters."""
    dropout: float = 0.0
    """0 only: with dropout the trained policy is another than the one that sampled, so more is refused."""
    target_modules: str | list[str] = ALL_LINEAR
    """Names of the linear layers that get adapters, e.g. [q_proj, v_proj]; all-linear: every one but the head."""


class FiltersSection(Section):
    """Groups that are not trained but replaced by another, by the raw rewards of their members."""

    dynamic: bool | None = None
    """Dynamic sampling: a group whose rewards differ by no more than 1e-6 is replaced. null: as the preset, on in dapo
    only."""
    mean_lower: float | None = None
    """A group is replaced unless its mean reward is above. null: no bound."""
    mean_upper: float | None = None
    """A group is replaced unless its mean reward is below. null: no bound."""
    max_filtered_fraction: float = Field(0.9, ge=0, lt=1)
    """Share past which the run stops: groups replaced since the last batch, of these and the complete ones that wait,
    which count as a batch and as 16 at least. 0.9: at most nine batches' worth of groups for one batch."""


class OverlongSection(Section):
    """What becomes of long answers; lengths in sampled tokens of all turns. Filters, replay and the reward in the
    metrics look at the reward without the penalty."""

    penalty: bool | None = None
    """Add a penalty from 0, at budget - cache tokens, to -1, at budget, to the reward that the advantage is made of.
    null: on where budget or cache is given, and in the preset dapo unless `mask_truncated` takes its place."""
    budget: PositiveInt | None = None
    """null: sampling.max_new_tokens."""
    cache: PositiveInt | None = None
    """Tokens below the budget over which the penalty grows. null: a fifth of the budget, as in DAPO's 4096 of 20480."""
    mask_truncated: bool = False
    """Answers that their budget cut off are not trained; their reward stays in the group's baseline."""


class ReplaySection(ReplayConfig):
    """Replay of good groups in the place of groups without signal; not together with dynamic sampling."""

    enabled: bool = False
    """Keep good groups, and train one of them, with the versions that sampled it, for each without signal."""


class TorchEngineSection(Section):
    """The embedded engine."""

    kind: Literal["torch"] = "torch"
    slots: int = Field(32, ge=8, multiple_of=8)
    """Requests decoded together, a multiple of 8."""
    max_context_tokens: PositiveInt = 2048
    """Prompt and answers of one attempt together."""
    kv_cache_bytes: PositiveInt | None = None
    """Keys and values of running requests take no more; requests that do not fit wait. None: as much as `slots`
    sequences of `max_context_tokens` need."""
    batch_invariant: bool = False
    """Refuse to start unless samples are independent of their batch mates to the last bit."""
    stream_every_s: PositiveFloat = 1.0
    """Sampled tokens are handed on so often; what a dead engine had not handed on is sampled again."""
    python: Path | None = None
    """Interpreter of the engine's process, of another virtual environment, say. null: that of the others."""


EngineSection = TorchEngineSection | SimulatedEngineSection


class FsdpTrainerSection(Section):
    """How the trainer's ranks compute and share what they hold."""

    kind: Literal["fsdp"] = "fsdp"
    """FSDP2: parameters, gradients and optimizer are cut over the ranks."""
    activation_checkpointing: bool = False
    """Recompute each transformer layer in the backward pass: memory for activations falls to about one layer's, the
    step takes up to a third longer, no bit changes."""
    whole_during_step: bool = True
    """On several ranks: every rank holds all parameters and gradients during an optimizer step (8 bytes a parameter in
    float32, 6 in bfloat16), and the ranks talk once a step. false: once and again in every pass, layer by layer."""


TrainerSection = FsdpTrainerSection | SimulatedTrainerSection


class WeightsSection(Section):
    """How trained weights reach the engines."""

    carrier: Literal["auto", "shared_memory", "file"] = "auto"
    """How weights get from trainer to engines. `shared_memory`: on one host. `file`: through the run folder, which all
    hosts share. `auto`: the first where trainer rank 0 and all engines are on one host, else the second."""
    sync: Literal["overlapped", "blocking"] = "overlapped"
    """`overlapped`: the next step trains while engines take over the weights. `blocking`: it waits for them."""
    deadline_s: PositiveFloat = 60.0
    """Past it an engine that has not taken over the weights is given up."""


class EvalSection(Section):
    """Accuracy on held-out problems, beside the training."""

    every_steps: NonNegativeInt = 0
    """0: never. Otherwise before the first, after every n-th and after the last step."""
    problems: PositiveInt = 512
    """Held-out problems, answered greedily."""
    max_new_tokens: PositiveInt | None = None
    """None: as many as `sampling.max_new_tokens`."""
    deadline_s: PositiveFloat = 600.0
    """One evaluation."""


class CheckpointSection(Section):
    """Durable states of the trainer, from which a run goes on."""

    every_steps: NonNegativeInt = 20
    """0: only at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""


class JournalSection(Section):
    """The record of every attempt on disk."""

    fsync_s: PositiveFloat = 1.0
    """Loss of the host costs at most so much of finished attempts."""
    segment_bytes: PositiveInt = 64 * 1024 * 1024
    """A journal file of this size is closed and the next begun."""


class NetworkSection(Section):
    """Addresses and deadlines of the processes."""

    interface: str = "auto"
    """What sockets are bound to: an address, IPv4 or IPv6, or the name of an interface, e.g. `eth0`, which is looked up
    on each host. `auto`: 127.0.0.1 on one host; on several the address from which a host reaches the others."""
    heartbeat_s: PositiveFloat = 1.0
    """Time between two signs of life of a peer."""
    peer_deadline_s: PositiveFloat = 10.0
    """Silence after which a peer counts as dead."""
    call_deadline_s: PositiveFloat = 60.0
    """An answer of a peer that need not wait for work."""
    long_poll_s: PositiveFloat = 5.0
    """An idle peer asks for work again so often."""
    startup_deadline_s: PositiveFloat = 180.0
    """From the start of the processes until all are ready."""
    shutdown_deadline_s: PositiveFloat = 120.0
    """From a signal on, for the step in training and a checkpoint; what has not ended by then is killed."""
    train_step_deadline_s: PositiveFloat = 600.0
    """One batch in training."""
    stall_report_s: PositiveFloat = 60.0
    """Without progress for so long, the watchdog says why."""

    @property
    def address(self) -> str:
        """What to bind to; `auto` and names of interfaces are replaced by an address before a process starts."""
        return "127.0.0.1" if self.interface == "auto" else self.interface


DeviceRange = NonNegativeInt | str | None


class DevicesSection(Section):
    """Devices by number: host 0 has the first, host 1 the next, as `flashflow check` prints them. `0-3,8`, or one."""

    trainer: DeviceRange = None
    """One device for each rank. null: the first that are free."""
    engine: DeviceRange = None
    """`placement.tensor_parallel` devices of one host for each engine. null: the next that are free."""


class NodesSection(Section):
    """Hosts that a role may run on: names or patterns, e.g. `gpu*,cpu-07`. null: any. Host names are those of Slurm's
    nodes where there are any."""

    trainer: str | None = None
    """Trainer ranks."""
    engine: str | None = None
    """Engines."""
    env: str | None = None
    """Env processes. null: hosts without devices, where there are such beside hosts that have some."""
    reward: str | None = None
    """Reward processes. null: as env."""


class PlacementSection(Section):
    """Processes per role, and where they run; docs/launch.md."""

    mode: Literal["separate"] = "separate"
    """Engines and trainers on devices of their own."""
    trainer: PositiveInt = 1
    """Trainer ranks; one in the in_process runtime."""
    engine: PositiveInt = 1
    """Inference engines."""
    tensor_parallel: PositiveInt = 1
    """Devices of one engine, all of one host; the torch engine computes on one."""
    devices: DevicesSection = DevicesSection()
    """Numbers of the devices."""
    nodes: NodesSection = NodesSection()
    """Selection of the hosts."""
    environment: dict[str, dict[str, str]] = {}
    """Variables laid over the environment of a role's processes, e.g. `{engine: {NCCL_DEBUG: INFO}}`."""
    env: PositiveInt = 1
    """Each runs `rollout.concurrency` attempts."""
    reward: PositiveInt = 1
    """Scorers."""
    threads: PositiveInt = 1
    """torch threads of each engine and trainer process."""
    max_restarts: NonNegativeInt = 3
    """Restarts of any one process of the fleet."""


class Config(Section):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection
    reward: RewardSection
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    batch: BatchSection = BatchSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    filters: FiltersSection = FiltersSection()
    overlong: OverlongSection = OverlongSection()
    replay: ReplaySection = ReplaySection()
    optimizer: OptimizerSection = OptimizerSection()
    critic: CriticSection | None = None
    lora: LoraSection | None = None
    engine: Annotated[EngineSection, Field(discriminator="kind")] = TorchEngineSection()
    trainer: Annotated[TrainerSection, Field(discriminator="kind")] = FsdpTrainerSection()
    weights: WeightsSection = WeightsSection()
    evaluation: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    journal: JournalSection = JournalSection()
    network: NetworkSection = NetworkSection()
    placement: PlacementSection = PlacementSection()
    simulate: SimulateSection = SimulateSection()

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def simulated(self) -> bool:
        """No model, no tokenizer and no environment: the parts that compute are simulated (config/rules.py)."""
        return self.trainer.kind == "simulated"

    @property
    def samples_per_batch(self) -> int:
        return self.batch.groups * self.rollout.group_size

    @property
    def max_staleness(self) -> int:
        return math.ceil(self.rollout.alpha)

    @property
    def max_groups_in_flight(self) -> int:
        """floor((1 + alpha) x groups) + redundant_groups: waiting, running and training together."""
        return math.floor((1 + self.rollout.alpha) * self.batch.groups) + self.rollout.redundant_groups

    @property
    def filtering(self) -> FilterConfig:
        """The filters with the preset's choice filled in."""
        fields = self.filters.model_dump() | {"dynamic": filters_dynamically(self.algorithm, self.filters)}
        return FilterConfig(**fields)

    @property
    def shaping(self) -> ShapingConfig:
        """What becomes of long answers, with the preset's choice and the default lengths filled in."""
        mask_truncated = self.overlong.mask_truncated
        if not penalises_overlong(self.algorithm, self.overlong):
            return ShapingConfig(mask_truncated=mask_truncated)
        budget, cache = overlong_lengths(self.overlong, self.sampling)
        return ShapingConfig(budget=budget, cache=cache, mask_truncated=mask_truncated)

    @property
    def replaying(self) -> ReplayConfig | None:
        """None: no replay buffer."""
        return ReplayConfig(**self.replay.model_dump(exclude={"enabled"})) if self.replay.enabled else None

    @property
    def trained_staleness(self) -> float:
        """Versions a trained sample, fresh or replayed, may be old: what the algorithm must be able to correct."""
        return trained_staleness(self.rollout, self.replay)


def filters_dynamically(algorithm: AlgorithmSection, filters: FiltersSection) -> bool:
    return filters.dynamic if filters.dynamic is not None else algorithm.preset in DYNAMIC_SAMPLING


def penalises_overlong(algorithm: AlgorithmSection, overlong: OverlongSection) -> bool:
    if overlong.penalty is not None:
        return overlong.penalty
    given = overlong.budget is not None or overlong.cache is not None
    return given or (algorithm.preset in OVERLONG_PENALTY and not overlong.mask_truncated)


def overlong_lengths(overlong: OverlongSection, sampling: SamplingSection) -> tuple[int, int]:
    """(budget, cache) with the defaults filled in."""
    budget = overlong.budget if overlong.budget is not None else sampling.max_new_tokens
    return budget, overlong.cache if overlong.cache is not None else max(1, budget // CACHE_SHARE)


def trained_staleness(rollout: RolloutSection, replay: ReplaySection) -> float:
    return max(rollout.alpha, replay.max_replay_staleness) if replay.enabled else rollout.alpha

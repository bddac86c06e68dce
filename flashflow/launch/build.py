"""Puts a role together from its sections. torch is imported inside, so that each process pays for its own role only."""

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flashflow.clock import Clock
from flashflow.config.sections import Config, TorchEngineSection
from flashflow.config.simulated import SimulatedEngineSection, SimulatedTrainerSection
from flashflow.journal import OpenJournal, open_journal
from flashflow.launch.startup import Reach
from flashflow.records import Task
from flashflow.transport.channel import Transport

if TYPE_CHECKING:
    from flashflow.engines.simulated import SimulatedEngine
    from flashflow.environments.episode import Episodes
    from flashflow.roles.buffer import Buffer
    from flashflow.roles.controller import Controller, Events, TrainerLink
    from flashflow.roles.engine import EngineRole
    from flashflow.roles.env import EnvRole, PromptCodec
    from flashflow.roles.proxy import ProxyRole
    from flashflow.roles.reward import RewardRole
    from flashflow.roles.trainer import TrainerRole
    from flashflow.simulate.spans import Spans
    from flashflow.trainers.simulated import SimulatedTrainer


def names(role: str, count: int) -> list[str]:
    return [f"{role}-{index}" for index in range(count)]


def buffer(config: Config, clock: Clock, open_journal: OpenJournal = open_journal) -> "Buffer":
    from flashflow.data.stream import make_stream
    from flashflow.roles.buffer import Buffer

    return Buffer(
        run=config.run,
        rollout=config.rollout,
        batch=config.batch,
        journal=config.journal,
        evaluation=config.evaluation,
        network=config.network,
        tasks=make_stream(config.data, config.run.seed),
        folder=config.run_folder / "journal",
        clock=clock,
        filters=config.filtering,
        replay=config.replaying,
        reward_name=config.reward.function,
        open_journal=open_journal,
    )


def prompt_codec(config: Config) -> "PromptCodec":
    if config.simulated:
        return _simulated_codec()
    from flashflow.data.chat import prompt_text, render_prompt
    from flashflow.roles.env import PromptCodec
    from flashflow.tokenizers import load_tokenizer, stop_ids

    tokenizer = load_tokenizer(config.model.path)
    column, system_prompt = config.data.prompt_column, config.data.system_prompt

    # The members of a group have the same prompt, and come together.
    @functools.lru_cache(maxsize=4096)
    def encoded(prompt: bytes) -> list[int]:
        return render_prompt(tokenizer, msgspec.msgpack.decode(prompt), system_prompt)

    def encode(task: Task) -> list[int]:
        return encoded(msgspec.msgpack.encode(task.row[column]))

    return PromptCodec(
        encode=encode,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        prompt_text=lambda task: prompt_text(task.row[column]),
        stop_ids=stop_ids(tokenizer, config.model.path),
    )


def _simulated_codec() -> "PromptCodec":
    """Prompts have lengths only; an answer is told from others by its one token, over and over, and its length."""
    from flashflow.roles.env import PromptCodec
    from flashflow.simulate.episodes import prompt_ids

    return PromptCodec(
        encode=lambda task: prompt_ids(task).tolist(),
        decode=lambda ids: f"{ids[0]} x {len(ids)}" if len(ids) else "",
        prompt_text=lambda task: "",
        stop_ids=[],
    )


def episodes(config: Config, index: int, clock: Clock, spans: "Spans | None") -> "Episodes | None":
    """How attempts of env `index` go on, where something stands in for their environments."""
    if not config.simulated:
        return None
    from flashflow.simulate.episodes import SimulatedEnvironments

    return SimulatedEnvironments(
        config.simulate,
        name=f"environment-{index}",
        seed=config.run.seed,
        group_size=config.rollout.group_size,
        clock=clock,
        spans=spans,
    )


def env(
    config: Config,
    index: int,
    transport: Transport,
    clock: Clock,
    spans: "Spans | None" = None,
    reach: Reach = lambda milestone: None,
) -> "EnvRole":
    from flashflow.roles.env import EnvRole

    return EnvRole(
        name=f"env-{index}",
        seed=config.run.seed,
        codec=prompt_codec(config),
        rollout=config.rollout,
        sampling=config.sampling,
        evaluation=config.evaluation,
        network=config.network,
        max_context_tokens=config.engine.max_context_tokens,
        buffer=transport.client("buffer-0"),
        proxy=transport.client("proxy-0"),
        rewards=[transport.client(name) for name in names("reward", config.placement.reward)],
        clock=clock,
        on_lease=lambda: reach("first_lease"),
        episodes=episodes(config, index, clock, spans),
    )


def proxy(config: Config, transport: Transport, clock: Clock) -> "ProxyRole":
    from flashflow.roles.proxy import ProxyRole

    return ProxyRole(
        engines={name: transport.client(name) for name in names("engine", config.placement.engine)},
        rollout=config.rollout,
        network=config.network,
        clock=clock,
    )


def reward(config: Config, *, workers: bool) -> "RewardRole":
    from flashflow.roles.reward import RewardRole

    return RewardRole(config.reward, startup_deadline_s=config.network.startup_deadline_s, workers=workers)


def engine(
    config: Config,
    index: int,
    clock: Clock,
    executor: Executor | None,
    spans: "Spans | None" = None,
    reach: Reach = lambda milestone: None,
) -> "EngineRole | SimulatedEngine":
    """spans: hears of a simulated engine's requests."""
    if isinstance(config.engine, SimulatedEngineSection):
        return _simulated_engine(config, config.engine, index, clock, spans)
    from flashflow.engines import make_engine
    from flashflow.models import load_model, set_threads
    from flashflow.roles.engine import EngineRole
    from flashflow.tokenizers import load_tokenizer

    assert isinstance(config.engine, TorchEngineSection)
    set_threads(config.placement.threads)
    model = load_model(config.model.path, config.model.dtype, config.model.device)
    return EngineRole(
        name=f"engine-{index}",
        engine=make_engine(config.engine, model, load_tokenizer(config.model.path)),
        section=config.engine,
        network=config.network,
        clock=clock,
        executor=executor,
        on_tokens=lambda: reach("first_token"),
    )


def _simulated_engine(
    config: Config, section: SimulatedEngineSection, index: int, clock: Clock, spans: "Spans | None"
) -> "SimulatedEngine":
    from flashflow.engines.simulated import SimulatedEngine

    return SimulatedEngine(
        name=f"engine-{index}",
        section=section,
        group_size=config.rollout.group_size,
        network=config.network,
        clock=clock,
        spans=spans,
    )


def trainer(
    config: Config, rank: int, transport: Transport, run_id: str, executor: Executor | None, clock: Clock
) -> "TrainerRole | SimulatedTrainer":
    """The process group must exist, but for a simulated one."""
    if isinstance(config.trainer, SimulatedTrainerSection):
        return _simulated_trainer(config, config.trainer, rank, transport, run_id, clock)
    from flashflow.models import load_model, set_threads
    from flashflow.roles.trainer import TrainerRole
    from flashflow.trainers.fsdp import FsdpTrainer

    set_threads(config.placement.threads)
    # Parameters and optimizer are float32; model.dtype is that of the computation.
    model = load_model(config.model.path, "float32", config.model.device)
    return TrainerRole(
        trainer=FsdpTrainer.from_config(config, model, run_id=run_id),
        rank=rank,
        buffer=transport.client("buffer-0"),
        folder=checkpoints(config),
        checkpoint=config.checkpoint,
        network=config.network,
        executor=executor,
    )


def _simulated_trainer(
    config: Config, section: SimulatedTrainerSection, rank: int, transport: Transport, run_id: str, clock: Clock
) -> "SimulatedTrainer":
    from flashflow.trainers.simulated import SimulatedTrainer

    return SimulatedTrainer(
        section=section,
        rank=rank,
        buffer=transport.client("buffer-0"),
        folder=checkpoints(config),
        checkpoint=config.checkpoint,
        network=config.network,
        clock=clock,
        run_id=run_id,
    )


def controller(
    config: Config, transport: Transport, trainer_link: "TrainerLink", events: "Events", clock: Clock, *, resume: bool
) -> "Controller":
    from flashflow.roles.controller import Controller

    return Controller(
        run=config.run,
        checkpoint=config.checkpoint,
        evaluation=config.evaluation,
        weights=config.weights,
        network=config.network,
        num_engines=config.placement.engine,
        buffer=transport.client("buffer-0"),
        proxy=transport.client("proxy-0"),
        trainer=trainer_link,
        events=events,
        clock=clock,
        resume=resume,
    )


def checkpoints(config: Config) -> Path:
    return config.run_folder / "checkpoints"


@contextlib.contextmanager
def local_process_group(config: Config) -> Iterator[None]:
    """A world of one for a trainer in this process; joins the one that exists already. None for a simulated one."""
    if config.simulated:
        yield
        return
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from flashflow.models import resolve_device
    from flashflow.transport import rpc

    if dist.is_initialized():
        yield
        return
    rpc.init_process_group(
        resolve_device(config.model.device).type,
        rank=0,
        world_size=1,
        meeting=HashStore(),
        deadline_s=config.network.train_step_deadline_s,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()

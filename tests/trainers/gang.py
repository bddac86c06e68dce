"""Trainer ranks as processes: `play` starts them and returns what each has found; as a script, one of them.

Arguments of the script: rank, ranks in all, folder, case.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_cases import Batch, described, make_batch, make_model, weights_of

from flashflow.algorithms.presets import resolve
from flashflow.config.sections import (
    CheckpointSection,
    CriticSection,
    FsdpTrainerSection,
    NetworkSection,
    OptimizerSection,
)
from flashflow.messages import FetchRows, Message, Rows
from flashflow.records import SampleId, Trajectory
from flashflow.roles.trainer import TrainerRole
from flashflow.trainers.base import TrainResult
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.sharding import full

STEPS = 10
PENALTY = {"kl_coefficient": 0.05, "kl_placement": "reward"}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "grpo": ("grpo", {}),
    "grpo with a penalty": ("grpo", PENALTY),
    "grpo with kl": ("grpo", {"kl_coefficient": 0.05}),
    "dr_grpo": ("dr_grpo", {}),
    "rloo": ("rloo", {}),
    "opmd": ("opmd", {}),
    "reinforce_pp": ("reinforce_pp", {}),
    "reinforce_pp with a penalty": ("reinforce_pp", PENALTY),
    "reinforce_pp_baseline": ("grpo", {"estimator": "reinforce_pp_baseline"}),
    "reinforce_pp_baseline with a penalty": ("grpo", {"estimator": "reinforce_pp_baseline", **PENALTY}),
    "gae": ("ppo", PENALTY),
}
"""Every estimator."""


def play(folder: Path, num_ranks: int, case: str) -> list[Any]:
    """What each rank has found."""
    folder.mkdir(exist_ok=True)
    arguments = [str(num_ranks), str(folder), case]
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), *arguments]) for rank in range(num_ranks)]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * num_ranks
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"{case}-{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@contextmanager
def trainer_of(preset: str = "grpo", *, alpha: float = 0.0, **options: Any) -> Iterator[FsdpTrainer]:
    """options: of the algorithm, and some of the trainer's."""
    taken = {name: options.pop(name) for name in ("section", "dtype", "optimizer_steps", "epochs") if name in options}
    advantage, loss = resolve(preset, options, alpha=alpha)
    trainer = FsdpTrainer(
        make_model(), run_id=f"gang-{os.getpid()}", advantage=advantage, loss=loss,
        optimizer=OptimizerSection(lr=1e-3, eps=1e-3), num_steps=STEPS, micro_batch_tokens=200, temperature=0.9,
        max_response_tokens=64, critic=CriticSection(lr=1e-2, eps=1e-3) if preset == "ppo" else None, **taken,
    )  # fmt: skip
    try:
        yield trainer
        dist.barrier()  # closing takes away what another rank may still read
    finally:
        trainer.close()


def batch_of(step: int) -> Batch:
    """Now and then a member failed, was not even run, or a group has no signal."""
    manifest, rows = make_batch(step, groups=4)
    if step % 2 == 0:
        rows[1] = msgspec.structs.replace(rows[1], reward=None, outcome="failed")
        rows[4:8] = [msgspec.structs.replace(row, reward=1.0) for row in rows[4:8]]
    if step % 3 == 0:
        short = {name: getattr(rows[9], name)[:1] for name in ("tokens", "mask", "logprobs", "versions")}
        rows[9] = msgspec.structs.replace(rows[9], reward=None, outcome="failed", **short)
    return described(manifest, rows)


def train(trainer: FsdpTrainer, step: int) -> TrainResult:
    manifest, rows = batch_of(step)
    return trainer.train(manifest, [rows[place] for place in trainer.rows_of(manifest)])


def families(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Metrics of ten steps of every estimator, two optimizer steps each."""
    found = {}
    for name, (preset, options) in FAMILIES.items():
        with trainer_of(preset, optimizer_steps=2, **options) as trainer:
            found[name] = [train(trainer, step).metrics for step in range(1, STEPS + 1)]
    return found


class Collectives(TorchDispatchMode):
    """Names of the collectives called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def communication(folder: Path) -> dict[str, Any]:
    """Reductions and gathers of one batch, and the weights after it, by dtype and by `whole_during_step`."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        for whole in (True, False):
            with trainer_of(dtype=dtype, section=FsdpTrainerSection(whole_during_step=whole)) as trainer:
                with Collectives() as calls:
                    metrics = train(trainer, 1).metrics
                found[dtype, whole] = {
                    "passes": metrics["num_micro_batches"],
                    "reductions": sum("reduce_scatter" in call for call in calls.names),
                    "gathers": sum("allgather_base" in call for call in calls.names),
                    "weights": weights_of(trainer),
                }
    return found


def state_of(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    assert trainer._critic is not None
    found = {}
    for part, updater, module in (
        ("policy", trainer._updater, trainer._scorer),
        ("critic", trainer._critic.updater, trainer._critic.module),
    ):
        for name, parameter in module.named_parameters():
            found[f"{part}.{name}"] = full(parameter.detach()).clone()
            for slot, value in updater.optimizer.state[parameter].items():
                found[f"{part}.{name}.{slot}"] = full(value).clone()
    return found


def saving(folder: Path) -> dict[str, torch.Tensor]:
    with trainer_of("ppo") as trainer:
        for step in (1, 2):
            train(trainer, step)
        trainer.save(folder / "step-000002")
        return state_of(trainer)


def resuming(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The state as loaded, and the metrics of the next step."""
    with trainer_of("ppo") as trainer:
        trainer.load(folder / "step-000002")
        state = state_of(trainer)
        return state, train(trainer, 3).metrics


class Buffer:
    """Hands out the rows of a batch, and notes which."""

    def __init__(self, rows: list[Trajectory]) -> None:
        self.rows = {row.sample: row for row in rows}
        self.asked: list[SampleId] = []

    async def call(self, message: Message, reply: Any, *, deadline_s: float) -> Any:
        assert isinstance(message, FetchRows)
        self.asked += message.samples
        return Rows(trajectories=[self.rows[sample] for sample in message.samples])

    def stream(self, message: Message, reply: Any, *, idle_deadline_s: float) -> AsyncIterator[Any]:
        raise NotImplementedError

    async def close(self) -> None: ...


def fetching(folder: Path) -> tuple[list[SampleId], dict[str, float]]:
    """What this rank asked the buffer for, and the metrics."""
    manifest, rows = batch_of(1)
    buffer = Buffer(rows)
    with trainer_of(optimizer_steps=2) as trainer:
        role = TrainerRole(
            trainer=trainer, rank=dist.get_rank(), buffer=buffer, folder=folder, checkpoint=CheckpointSection(),
            network=NetworkSection(), executor=None,
        )  # fmt: skip
        return buffer.asked, asyncio.run(role.train(manifest)).metrics


CASES = {case.__name__: case for case in (families, communication, saving, resuming, fetching)}


def main(rank: int, num_ranks: int, folder: Path, case: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{case}-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.save(CASES[case](folder), folder / f"{case}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])

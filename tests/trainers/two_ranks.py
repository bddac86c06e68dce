"""One rank of test_ranks.py: trains, saves, writes what an engine would get.

Arguments: rank, ranks in all, folder, case.
"""

import os
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from trainer_cases import Batch, described, make_batch, make_model, weights_of

from flashflow.algorithms.presets import resolve
from flashflow.config.sections import CriticSection, OptimizerSection
from flashflow.trainers.base import TrainResult
from flashflow.trainers.fsdp import FsdpTrainer

BUDGET = 200
"""Odd numbers of micro-batches: with two ranks one of them idles in the last round."""


def make(run_id: str, case: str) -> FsdpTrainer:
    """case: `one step`, `several steps`, or a kind of critic."""
    preset = "grpo" if case.endswith("step") or case.endswith("steps") else "ppo"
    advantage, loss = resolve(preset, {"kl_coefficient": 0.05, "kl_placement": "reward"}, alpha=1.0)
    critic = CriticSection(kind=case, lr=1e-2, eps=1e-3) if preset == "ppo" else None  # type: ignore[arg-type]
    return FsdpTrainer(
        make_model(), run_id=run_id, advantage=advantage, loss=loss,
        optimizer=OptimizerSection(lr=1e-2, eps=1e-3, clip_norm=0.5), num_steps=10, micro_batch_tokens=BUDGET,
        temperature=0.9, max_response_tokens=64, critic=critic,
        optimizer_steps=1 if case == "one step" else 2, epochs=1 if case == "one step" else 2,
    )  # fmt: skip


def second_batch() -> Batch:
    """With a member that failed and, its only mate being left, a group that is measured but has no gradient."""
    manifest, rows = make_batch(2, groups=5, group_size=2)
    return described(manifest, [msgspec.structs.replace(rows[0], reward=None, outcome="failed"), *rows[1:]])


def train_own(trainer: FsdpTrainer, batch: Batch) -> TrainResult:
    manifest, rows = batch
    return trainer.train(manifest, [rows[place] for place in trainer.rows_of(manifest)])


def run(trainer: FsdpTrainer, folder: Path) -> dict[str, object]:
    """The outcome of two steps, a checkpoint in between."""
    results = [train_own(trainer, make_batch(1))]
    trainer.save(folder / "step-000001")
    results.append(train_own(trainer, second_batch()))
    return {"metrics": [result.metrics for result in results], "weights": weights_of(trainer)}


def main(rank: int, num_ranks: int, folder: Path, case: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    trainer = make(f"test-ranks-{os.getppid()}", case)
    outcome = run(trainer, folder)
    outcome["logprobs"] = trainer.logprobs(make_batch(3)[1])
    torch.save(outcome, folder / f"rank-{rank}.pt")
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])

"""One rank of test_lora_ranks.py: trains adapters, saves, writes what an engine would get.

Arguments: rank, ranks in all, folder, dtype.
"""

import os
import sys
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from trainer_cases import make_batch, make_model, weights_of

from flashflow.algorithms.presets import resolve
from flashflow.config.sections import LoraSection, OptimizerSection
from flashflow.trainers.base import TrainResult
from flashflow.trainers.fsdp import FsdpTrainer

Dtype = Literal["float32", "bfloat16"]


def make(run_id: str, dtype: Dtype) -> FsdpTrainer:
    """With a KL term, whose reference is the model below the adapters, and several optimizer steps."""
    advantage, loss = resolve("grpo", {"kl_coefficient": 0.05, "kl_placement": "loss"}, alpha=1.0)
    return FsdpTrainer(
        make_model(), run_id=run_id, advantage=advantage, loss=loss,
        optimizer=OptimizerSection(lr=1e-2, eps=1e-3, clip_norm=0.5), num_steps=10, micro_batch_tokens=200,
        temperature=0.9, max_response_tokens=64, dtype=dtype, optimizer_steps=2, epochs=2,
        lora=LoraSection(rank=3, alpha=6), seed=1,
    )  # fmt: skip


def train(trainer: FsdpTrainer, step: int) -> TrainResult:
    manifest, rows = make_batch(step, groups=4)
    return trainer.train(manifest, [rows[place] for place in trainer.rows_of(manifest)])


def run(trainer: FsdpTrainer, folder: Path) -> dict[str, object]:
    """The outcome of two steps, a checkpoint in between."""
    first = train(trainer, 1)
    trainer.save(folder / "step-000001")
    second = train(trainer, 2)
    logprobs = trainer.logprobs(make_batch(3)[1])
    return {"metrics": [first.metrics, second.metrics], "weights": weights_of(trainer), "logprobs": logprobs}


def main(rank: int, num_ranks: int, folder: Path, dtype: Dtype) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    trainer = make(f"test-lora-ranks-{os.getppid()}", dtype)
    torch.save(run(trainer, folder), folder / f"rank-{rank}.pt")
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])  # type: ignore[arg-type]

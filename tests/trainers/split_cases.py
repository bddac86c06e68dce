"""One optimizer step in float64 on a toy model, split as a case says; as a script, one rank of test_splits.py.

Arguments of the script: rank, ranks in all, folder.
"""

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from trainer_cases import VOCABULARY, make_batch, make_manifest

from flashflow.algorithms.presets import PRESETS, resolve
from flashflow.algorithms.settings import NO_SHAPING, AdvantageConfig, LossConfig
from flashflow.packing import MicroBatch
from flashflow.records import ManifestRow, Trajectory
from flashflow.shapes import safe_length
from flashflow.trainers.batch import Consumed, consume, token_batch
from flashflow.trainers.objectives import ActorCriticObjective, Objective, PolicyObjective
from flashflow.trainers.passes import Passes
from flashflow.trainers.sharding import full, make_mesh, shard, total
from flashflow.trainers.share import Share, deal_rows

DEVICE = torch.device("cpu")
ALGORITHMS: dict[str, tuple[AdvantageConfig, LossConfig]] = {
    **{name: resolve(name, {}, alpha=1) for name in sorted(PRESETS)},
    "grpo with kl and entropy": resolve("grpo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, alpha=1),
    "dapo with kl and entropy": resolve("dapo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, alpha=1),
}


class Split(NamedTuple):
    """How a step is cut."""

    max_tokens: int
    order: int
    """Seed of the order of the rows."""


SPLITS = [Split(max_tokens, order) for order, max_tokens in enumerate((70, 250))]


class ToyScorer(nn.Module):
    """Maps as TokenScorer does, in float64: a token is scored from the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, VOCABULARY, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(
        self, tokens_BT: torch.Tensor, mask_BT: torch.Tensor, *, entropy_gradient: bool = False, hidden: bool = False
    ) -> tuple[torch.Tensor, ...]:
        hidden_BTD = self.embedding(tokens_BT).cumsum(1) / torch.arange(1, tokens_BT.shape[1] + 1)[:, None]
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD)
        all_BTV = self.head(hidden_BTD).log_softmax(-1).roll(1, dims=1)
        logprobs_BT = all_BTV.gather(-1, tokens_BT[..., None]).squeeze(-1)
        entropies_BT = -(all_BTV.exp() * all_BTV).sum(-1)
        scores = (torch.where(mask_BT, logprobs_BT, 0.0), torch.where(mask_BT, entropies_BT, 0.0))
        return (*scores, hidden_BTD) if hidden else scores


class ToyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(self, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, self.linear(hidden_BTD).squeeze(-1).roll(1, dims=1), 0.0)


def rows_of_the_step() -> list[Trajectory]:
    """Five groups; one member failed, one group has no signal."""
    _, rows = make_batch(1, groups=5, group_size=3)
    rows[4] = msgspec.structs.replace(rows[4], reward=None, outcome="failed")
    rows[6:9] = [msgspec.structs.replace(row, reward=0.25) for row in rows[6:9]]
    return rows


def share_of(rows: list[Trajectory]) -> tuple[list[ManifestRow], Share]:
    named = make_manifest(1, rows, 3).rows
    hands = deal_rows(named, NO_SHAPING, 1, dist.get_world_size())
    own = [rows[place] for place in hands[dist.get_rank()]]
    return named, Share([row.num_tokens for row in rows], hands, dist.get_rank(), own)


def consumed_of(rows: list[Trajectory], advantage: AdvantageConfig, loss: LossConfig) -> Consumed:
    """With prox, reference and values near the behaviour's, so that r, w and rho are not 1; each row has its own."""
    named, share = share_of(rows)
    rows = list(share.rows)
    longest = max(row.num_tokens for row in rows)
    noise = np.zeros((3, len(rows), longest))
    for place, row in enumerate(rows):
        rng = np.random.default_rng((row.sample.group, row.sample.member))
        noise[:, place, : row.num_tokens] = rng.normal(0, 0.4, (3, row.num_tokens))
        noise[:2, place, : row.num_tokens] += row.logprobs
    prox, reference, values = torch.from_numpy(noise)
    found = consume(
        named, share, advantage, loss, total=lambda part: total(part, DEVICE), num_updates=2,
        reference_NT=reference if loss.needs_reference else None,
        prox_NT=prox, values_NT=values if advantage.estimator == "gae" else None,
    )  # fmt: skip
    return replace(found, prox_NT=prox if loss.needs_prox else None)


class Step:
    """The sharded toy and the gradient of the step."""

    def __init__(self) -> None:
        mesh = make_mesh(DEVICE)
        self.scorer, self.head = ToyScorer(), ToyHead()
        # float32 here only says that nothing is cast.
        shard(self.scorer, self.scorer.layers, mesh, torch.float32)
        shard(self.head, nn.ModuleList(), mesh, torch.float32)

    def split(self, name: str, split: Split) -> tuple[dict[str, float], torch.Tensor]:
        """(losses, the whole gradient as one vector)."""
        rows = rows_of_the_step()
        random.Random(split.order).shuffle(rows)
        objective, consumed = self._objective(name, rows)
        passes = Passes(share_of(rows)[1], 3, split.max_tokens, DEVICE)
        outcome = passes.train(objective, consumed.counted_rows, consumed.denominators(range(len(rows))))
        return outcome.losses, self._gradient()

    def whole(self, name: str) -> tuple[dict[str, float], torch.Tensor]:
        """In one forward and backward pass; alone."""
        rows = rows_of_the_step()
        objective, consumed = self._objective(name, rows)
        length = safe_length(max(row.num_tokens for row in rows))
        batch = token_batch(share_of(rows)[1], MicroBatch(tuple(consumed.counted_rows), length), 3, DEVICE)
        result = objective(batch, consumed.denominators(range(len(rows))))
        result.total.backward()  # type: ignore[no-untyped-call]
        return {name: part.item() for name, part in result.parts.items()}, self._gradient()

    def _objective(self, name: str, rows: list[Trajectory]) -> tuple[Objective, Consumed]:
        advantage, loss = ALGORITHMS[name]
        loss = loss.for_responses(64)
        consumed = consumed_of(rows, advantage, loss)
        if advantage.estimator == "gae":
            return ActorCriticObjective(self.scorer, self.head, 0.3, loss, consumed), consumed
        return PolicyObjective(self.scorer, loss, consumed), consumed

    def _gradient(self) -> torch.Tensor:
        parts = []
        for parameter in [*self.scorer.parameters(), *self.head.parameters()]:
            if parameter.grad is not None:
                parts.append(full(parameter.grad).flatten().clone())
                parameter.grad = None
        return torch.cat(parts)


def main(rank: int, num_ranks: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    step = Step()
    found = [(name, *step.split(name, split)) for name in ALGORITHMS for split in SPLITS]
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

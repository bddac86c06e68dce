"""A trainer rank asks the buffer for its own rows, and for no others."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashflow.config.sections import CheckpointSection, NetworkSection
from flashflow.messages import FetchRows, Message, Rows
from flashflow.records import Manifest, ManifestRow, SampleId, Trajectory
from flashflow.roles.bookkeeper import placeholder
from flashflow.roles.trainer import ROWS_PER_FETCH, TrainerRole
from flashflow.trainers.base import TrainResult


class Buffer:
    """Has a placeholder for every sample, and notes what it was asked for."""

    def __init__(self) -> None:
        self.requests: list[FetchRows] = []

    async def call(self, message: Message, reply: Any, *, deadline_s: float) -> Any:
        assert isinstance(message, FetchRows)
        self.requests.append(message)
        return Rows(trajectories=[placeholder(sample) for sample in message.samples])

    def stream(self, message: Message, reply: Any, *, idle_deadline_s: float) -> AsyncIterator[Any]:
        raise NotImplementedError

    async def close(self) -> None: ...


class EveryOther:
    """A trainer that works on every second row."""

    def __init__(self) -> None:
        self.step = 0
        self.trained: list[Trajectory] = []

    def rows_of(self, manifest: Manifest) -> Sequence[int]:
        return range(1, len(manifest.rows), 2)

    def train(self, manifest: Manifest, rows: list[Trajectory]) -> TrainResult:
        self.trained += rows
        return TrainResult(step=manifest.step, metrics={})


def test_a_rank_fetches_its_own_rows_in_bounded_messages(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = [SampleId(int(rng.integers(1000)), member) for member in range(3 * ROWS_PER_FETCH)]
    rows = [
        ManifestRow(
            sample=sample, num_tokens=1, num_sampled=0, initiating_version=0, reward=None, outcome="failed"
        )
        for sample in samples
    ]  # fmt: skip
    buffer, trainer = Buffer(), EveryOther()
    role = TrainerRole(
        trainer=trainer, rank=0, buffer=buffer, folder=tmp_path, checkpoint=CheckpointSection(),  # type: ignore[arg-type]
        network=NetworkSection(), executor=None,
    )  # fmt: skip
    asyncio.run(role.train(Manifest(step=4, rows=rows, group_size=1, rng_key=0)))
    assert [sample for request in buffer.requests for sample in request.samples] == samples[1::2]
    assert [row.sample for row in trainer.trained] == samples[1::2]
    assert [(request.step, len(request.samples)) for request in buffer.requests] == [(4, 64), (4, 32)]

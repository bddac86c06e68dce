"""A manifest's rows as tensors: what counts, what each row's reward is worth, and the padded micro-batches.

Letters: N rows of the whole batch, B rows of a micro-batch, T padded length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from flashflow.algorithms.advantages import token_advantages
from flashflow.algorithms.kl import kl_penalty
from flashflow.algorithms.settings import NO_SHAPING, AdvantageConfig, LossConfig, ShapingConfig
from flashflow.errors import ContractError
from flashflow.packing import MicroBatch
from flashflow.records import Manifest, Trajectory
from flashflow.trainers.scorable import is_scorable
from flashflow.trainers.shaping import is_trained, shaped_reward

WITHOUT_ADVANTAGE = frozenset({"kimi", "dppo_tv"})
"""Surrogates with a term that the advantage does not multiply."""


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch on the device, padded on the right."""

    rows: tuple[int, ...]
    """Places in the whole batch."""
    tokens_BT: torch.Tensor
    """int64; 0 beyond a row's end, where nothing looks."""
    mask_BT: torch.Tensor
    """bool; True where the policy sampled the token and it is to be trained."""
    behaviour_BT: torch.Tensor
    """float32 nats at the sampling temperature; 0 outside the mask."""
    lags_BT: torch.Tensor
    """int64; trainer's version at hand-over minus the token's version; -1 outside the mask."""

    def select(self, values_NT: torch.Tensor) -> torch.Tensor:
        """Of values [N, longest row], those of this micro-batch as [B, T]."""
        length = self.tokens_BT.shape[1]
        chosen_BT = values_NT[list(self.rows), :length].to(self.tokens_BT.device)
        return F.pad(chosen_BT, (0, length - chosen_BT.shape[1]))


@dataclass(frozen=True)
class Consumed:
    """What the whole batch says about its rows, however it is split."""

    advantages_NT: torch.Tensor
    """float32; 0 outside the mask and for rows that are not scorable."""
    rewards_N: torch.Tensor
    """float32 raw task rewards; 0 where not scorable."""
    counted_rows: list[int]
    """Places of the rows to be trained; the others, not scorable or masked as truncated, take no part in any pass."""
    num_tokens: int
    """To be trained."""
    num_sequences: int
    """With a token to be trained."""


def check_rows(manifest: Manifest, rows: Sequence[Trajectory], step: int) -> None:
    """Raises ContractError unless `rows` are the manifest's, in its order, and it is the batch after `step`."""
    if manifest.step != step + 1:
        raise ContractError(
            f"manifest {manifest.step} handed to a trainer at step {step}, which trains {step + 1} next"
        )
    if len(rows) != len(manifest.rows):
        raise ContractError(f"manifest {manifest.step} names {len(manifest.rows)} samples, {len(rows)} came")
    for place, (named, row) in enumerate(zip(manifest.rows, rows, strict=True)):
        if named.sample != row.sample:
            raise ContractError(f"manifest {manifest.step} row {place} is {named.sample}, {row.sample} came")
        if row.num_tokens and row.mask[0]:
            raise ContractError(
                f"sample {row.sample}: its first token is sampled, but nothing precedes it; add a prompt"
            )


def consume(
    rows: Sequence[Trajectory],
    advantage: AdvantageConfig,
    loss: LossConfig,
    reference_NT: torch.Tensor | None,
    shaping: ShapingConfig = NO_SHAPING,
) -> Consumed:
    """Group statistics and denominators, over all rows, before any split.

    reference_NT: log-probabilities of the reference model, needed for a KL penalty placed in the reward.
    """
    trained = [is_trained(row, shaping) for row in rows]
    mask_NT = padded([row.mask for row in rows]).bool() & torch.tensor(trained, dtype=torch.bool)[:, None]
    penalty_NT = None
    if loss.needs_reference and loss.kl_placement == "reward" and reference_NT is not None:
        behaviour_NT = padded([row.logprobs for row in rows])
        penalty_NT = loss.kl_coefficient * kl_penalty(
            behaviour_logprobs=behaviour_NT, ref_logprobs=reference_NT, mask=mask_NT
        )
    result = token_advantages(
        advantage,
        rewards=[shaped_reward(row, shaping) for row in rows],
        group_ids=[row.sample.group for row in rows],
        mask=mask_NT,
        scorable=[is_scorable(row) for row in rows],
        penalty=penalty_NT,
    )
    rewards_N = [row.reward if row.reward is not None and is_scorable(row) else 0.0 for row in rows]
    return Consumed(
        advantages_NT=result.advantages.float(),
        rewards_N=torch.tensor(rewards_N, dtype=torch.float32),
        counted_rows=[place for place, row in enumerate(rows) if is_trained(row, shaping)],
        num_tokens=int(result.mask.sum()),
        num_sequences=int(result.mask.any(dim=1).sum()),
    )


def gradient_rows(loss: LossConfig, consumed: Consumed) -> list[int]:
    """Rows whose loss may have a gradient: all of them where a term does without the advantage, else those with one."""
    if (
        loss.loss is not None
        or loss.surrogate in WITHOUT_ADVANTAGE
        or loss.entropy_coefficient > 0
        or (loss.kl_coefficient > 0 and loss.kl_placement == "loss")
    ):
        return consumed.counted_rows
    has_advantage_N = consumed.advantages_NT.any(dim=1)
    return [row for row in consumed.counted_rows if has_advantage_N[row]]


def token_batch(rows: Sequence[Trajectory], micro_batch: MicroBatch, version: int, device: torch.device) -> TokenBatch:
    """version: the trainer's at hand-over. An idle pass is masked out whole."""
    shape = (len(micro_batch.rows), micro_batch.length)
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    behaviour, lags = np.zeros(shape, np.float32), np.full(shape, -1, np.int64)
    for place, index in enumerate(micro_batch.rows):
        row = rows[index]
        end = row.num_tokens
        tokens[place, :end] = row.tokens
        if micro_batch.idle:
            continue
        sampled = row.mask.astype(np.bool_)
        mask[place, :end] = sampled
        behaviour[place, :end] = np.where(sampled, row.logprobs, 0)
        lags[place, :end] = np.where(sampled, version - row.versions, -1)
    tensors = [torch.from_numpy(array).to(device) for array in (tokens, mask, behaviour, lags)]
    return TokenBatch(micro_batch.rows, *tensors)


def padded(rows: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    """Arrays of N lengths as [N, longest], 0 beyond; float32."""
    whole = np.zeros((len(rows), max((len(row) for row in rows), default=0)), np.float32)
    for place, row in enumerate(rows):
        whole[place, : len(row)] = row
    return torch.from_numpy(whole)

"""A manifest's rows as tensors: what counts, what each row's reward is worth, and the padded micro-batches.

Letters: N rows of the whole batch, B rows of a micro-batch, T padded length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from flashflow.algorithms.advantages import token_advantages
from flashflow.algorithms.aggregation import Denominators
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
    """What the whole batch says about its rows at consumption, before the first optimizer step and however it is
    split."""

    advantages_NT: torch.Tensor
    """float32; 0 outside the mask and for rows that are not scorable."""
    mask_NT: torch.Tensor
    """bool; tokens to be trained."""
    rewards_N: torch.Tensor
    """float32 raw task rewards; 0 where not scorable."""
    counted_rows: list[int]
    """Places of the rows to be trained; the others, not scorable or masked as truncated, take no part in any pass."""
    num_updates: int
    """Optimizer steps on the batch."""
    reference_NT: torch.Tensor | None
    """Log-probabilities of the reference model; None where there is none."""
    prox_NT: torch.Tensor | None
    """The trainer's own log-probabilities before the first step; None with one step, whose current ones they are, and
    where the loss needs none."""
    values_NT: torch.Tensor | None
    """The critic's before the first step; None where there is none."""
    returns_NT: torch.Tensor | None
    """float32 targets of the critic."""

    @property
    def num_tokens(self) -> int:
        """To be trained."""
        return int(self.mask_NT.sum())

    def denominators(self, rows: Sequence[int]) -> Denominators:
        """Of the optimizer step on these rows, over all ranks."""
        mask_NT = self.mask_NT[list(rows)]
        return Denominators(int(mask_NT.sum()), int(mask_NT.any(dim=1).sum()))


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


def counted_rows(rows: Sequence[Trajectory], shaping: ShapingConfig = NO_SHAPING) -> list[int]:
    """Places of the rows to be trained."""
    return [place for place, row in enumerate(rows) if is_trained(row, shaping)]


def split_by_group(rows: Sequence[Trajectory], num_parts: int) -> list[list[int]]:
    """Places of the rows of each optimizer step: whole groups in the batch's order, as many in each as in the others,
    or one more. Fewer parts where there are fewer groups."""
    groups = [list(members) for _, members in groupby(range(len(rows)), key=lambda place: rows[place].sample.group)]
    cuts = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    parts = [list(chain.from_iterable(groups[start:end])) for start, end in pairwise(cuts)]
    return [part for part in parts if part]


def consume(
    rows: Sequence[Trajectory],
    advantage: AdvantageConfig,
    loss: LossConfig,
    *,
    shaping: ShapingConfig = NO_SHAPING,
    num_updates: int = 1,
    reference_NT: torch.Tensor | None = None,
    prox_NT: torch.Tensor | None = None,
    values_NT: torch.Tensor | None = None,
) -> Consumed:
    """Group statistics and advantages, over all rows, before any split. Tensors as Consumed describes them.

    reference_NT is needed for a KL penalty placed in the reward too, values_NT for gae.
    """
    trained = [is_trained(row, shaping) for row in rows]
    mask_NT = padded([row.mask for row in rows]).bool() & torch.tensor(trained, dtype=torch.bool)[:, None]
    penalty_NT = None
    if loss.needs_reference and loss.kl_placement == "reward" and reference_NT is not None:
        behaviour_NT = padded([row.logprobs for row in rows])
        penalty_NT = loss.kl_coefficient * kl_penalty(
            behaviour_logprobs=behaviour_NT, ref_logprobs=reference_NT.cpu(), mask=mask_NT
        )
    result = token_advantages(
        advantage,
        rewards=[shaped_reward(row, shaping) for row in rows],
        group_ids=[row.sample.group for row in rows],
        mask=mask_NT,
        scorable=[is_scorable(row) for row in rows],
        values=None if values_NT is None else values_NT.cpu(),
        penalty=penalty_NT,
    )
    rewards_N = [row.reward if row.reward is not None and is_scorable(row) else 0.0 for row in rows]
    return Consumed(
        advantages_NT=result.advantages.float(),
        mask_NT=result.mask,
        rewards_N=torch.tensor(rewards_N, dtype=torch.float32),
        counted_rows=counted_rows(rows, shaping),
        num_updates=num_updates,
        reference_NT=reference_NT,
        prox_NT=prox_NT,
        values_NT=values_NT,
        returns_NT=None if result.returns is None else result.returns.float(),
    )


def gradient_rows(loss: LossConfig, consumed: Consumed) -> list[int]:
    """Rows whose policy loss may have a gradient: all of them where a term does without the advantage, else those with
    one."""
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

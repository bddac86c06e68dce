"""A manifest's rows as tensors: what counts, what each row's reward is worth, and the padded micro-batches.

Tensors hold the rows of one rank; what the whole batch must know comes from the manifest, or is summed over the ranks.

Letters: N rows of this rank, B rows of a micro-batch, T padded length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from flashflow.algorithms.advantages import Total, token_advantages
from flashflow.algorithms.aggregation import Denominators
from flashflow.algorithms.kl import kl_penalty
from flashflow.algorithms.settings import NO_SHAPING, AdvantageConfig, LossConfig, ShapingConfig
from flashflow.errors import ContractError
from flashflow.packing import MicroBatch
from flashflow.records import Manifest, ManifestRow, Trajectory
from flashflow.trainers.scorable import is_scorable
from flashflow.trainers.shaping import is_trained, shaped_reward
from flashflow.trainers.share import Share

WITHOUT_ADVANTAGE = frozenset({"kimi", "dppo_tv"})
"""Surrogates with a term that the advantage does not multiply."""


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch on the device, padded on the right."""

    rows: tuple[int, ...]
    """Places among the rank's rows; fewer than B in an idle pass: none."""
    tokens_BT: torch.Tensor
    """int64; 0 beyond a row's end, where nothing looks."""
    mask_BT: torch.Tensor
    """bool; True where the policy sampled the token and it is to be trained."""
    behaviour_BT: torch.Tensor
    """float32 nats at the sampling temperature; 0 outside the mask."""
    lags_BT: torch.Tensor
    """int64; trainer's version at hand-over minus the token's version; -1 outside the mask."""

    def select(self, values_NT: torch.Tensor) -> torch.Tensor:
        """Of values [N, longest row], those of this micro-batch as [B, T]; 0 in an idle pass."""
        size, length = self.tokens_BT.shape
        chosen_BT = values_NT[list(self.rows), :length].to(self.tokens_BT.device)
        return F.pad(chosen_BT, (0, length - chosen_BT.shape[1], 0, size - chosen_BT.shape[0]))


@dataclass(frozen=True)
class Consumed:
    """What the whole batch says about its rows at consumption, before the first optimizer step and however it is
    split. Tensors are of this rank's rows, the rest is of all."""

    advantages_NT: torch.Tensor
    """float32; 0 outside the mask and for rows that are not scorable."""
    mask_NT: torch.Tensor
    """bool; tokens to be trained."""
    rewards_N: torch.Tensor
    """float32 raw task rewards; 0 where not scorable."""
    trained_tokens: list[int]
    """Of each row of the batch; 0 where it takes no part."""
    counted_rows: list[int]
    """Places of the rows to be trained; the others, not scorable or masked as truncated, take no part in any pass."""
    rows_with_advantage: frozenset[int]
    """Places of the rows with a token whose advantage is not 0."""
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
        return sum(self.trained_tokens)

    def denominators(self, rows: Sequence[int]) -> Denominators:
        """Of the optimizer step on these rows, over all ranks."""
        tokens = [self.trained_tokens[place] for place in rows]
        return Denominators(sum(tokens), sum(count > 0 for count in tokens))


def check_rows(manifest: Manifest, rows: Sequence[Trajectory], places: Sequence[int], step: int) -> None:
    """Raises ContractError unless `rows` are the manifest's at `places`, and it is the batch after `step`."""
    if manifest.step != step + 1:
        raise ContractError(
            f"manifest {manifest.step} handed to a trainer at step {step}, which trains {step + 1} next"
        )
    if len(rows) != len(places):
        raise ContractError(f"manifest {manifest.step} names {len(places)} samples for this rank, {len(rows)} came")
    for place, row in zip(places, rows, strict=True):
        named = manifest.rows[place]
        if named.sample != row.sample:
            raise ContractError(f"manifest {manifest.step} row {place} is {named.sample}, {row.sample} came")
        if (named.num_tokens, named.num_sampled) != (row.num_tokens, row.num_sampled):
            raise ContractError(
                f"sample {row.sample}: manifest {manifest.step} says {named.num_tokens} tokens, {named.num_sampled} of "
                f"them sampled; {row.num_tokens} and {row.num_sampled} came"
            )
        if row.num_tokens and row.mask[0]:
            raise ContractError(
                f"sample {row.sample}: its first token is sampled, but nothing precedes it; add a prompt"
            )


def counted_rows(rows: Sequence[ManifestRow], shaping: ShapingConfig = NO_SHAPING) -> list[int]:
    """Places of the rows to be trained."""
    return [place for place, row in enumerate(rows) if is_trained(row, shaping)]


def consume(
    rows: Sequence[ManifestRow],
    share: Share,
    advantage: AdvantageConfig,
    loss: LossConfig,
    *,
    total: Total,
    shaping: ShapingConfig = NO_SHAPING,
    num_updates: int = 1,
    reference_NT: torch.Tensor | None = None,
    prox_NT: torch.Tensor | None = None,
    values_NT: torch.Tensor | None = None,
) -> Consumed:
    """Group statistics and advantages, over all rows, before any split. Tensors as Consumed describes them.

    total: sums over the ranks, which all call this. reference_NT is needed for a KL penalty placed in the reward too,
    values_NT for gae.
    """
    counted = counted_rows(rows, shaping)
    trained_tokens = [row.num_sampled if is_trained(row, shaping) else 0 for row in rows]
    trained_N = torch.tensor([trained_tokens[place] > 0 for place in share.places], dtype=torch.bool)
    mask_NT = padded([row.mask for row in share.rows]).bool() & trained_N[:, None]
    penalty_NT = None
    if loss.needs_reference and loss.kl_placement == "reward" and reference_NT is not None:
        behaviour_NT = padded([row.logprobs for row in share.rows])
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
        places=share.places,
        total=total,
    )
    return Consumed(
        advantages_NT=result.advantages.float(),
        mask_NT=result.mask,
        rewards_N=torch.tensor([_raw_reward(rows[place]) for place in share.places], dtype=torch.float32),
        trained_tokens=trained_tokens,
        counted_rows=counted,
        rows_with_advantage=_rows_with_advantage(result.advantages, share, len(rows), total),
        num_updates=num_updates,
        reference_NT=reference_NT,
        prox_NT=prox_NT,
        values_NT=values_NT,
        returns_NT=None if result.returns is None else result.returns.float(),
    )


def _raw_reward(row: ManifestRow) -> float:
    return row.reward if row.reward is not None and is_scorable(row) else 0.0


def _rows_with_advantage(advantages_NT: torch.Tensor, share: Share, num_rows: int, total: Total) -> frozenset[int]:
    places_N = torch.tensor(share.places, dtype=torch.int64)
    flags = torch.zeros(num_rows).index_copy(0, places_N, advantages_NT.float().any(dim=1).float())
    return frozenset(total(flags).nonzero().flatten().tolist())


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
    return [row for row in consumed.counted_rows if row in consumed.rows_with_advantage]


def token_batch(share: Share, micro_batch: MicroBatch, version: int, device: torch.device) -> TokenBatch:
    """version: the trainer's at hand-over. An idle pass is one row, masked out whole."""
    indices = tuple(share.own[place] for place in micro_batch.rows)
    shape = (max(1, len(indices)), micro_batch.length)
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    behaviour, lags = np.zeros(shape, np.float32), np.full(shape, -1, np.int64)
    for place, index in enumerate(indices):
        row = share.rows[index]
        end = row.num_tokens
        tokens[place, :end] = row.tokens
        sampled = row.mask.astype(np.bool_)
        mask[place, :end] = sampled
        behaviour[place, :end] = np.where(sampled, row.logprobs, 0)
        lags[place, :end] = np.where(sampled, version - row.versions, -1)
    tensors = [torch.from_numpy(array).to(device) for array in (tokens, mask, behaviour, lags)]
    return TokenBatch(indices, *tensors)


def padded(rows: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    """Arrays of N lengths as [N, longest], 0 beyond, at least one column; float32."""
    whole = np.zeros((len(rows), max((len(row) for row in rows), default=1)), np.float32)
    for place, row in enumerate(rows):
        whole[place, : len(row)] = row
    return torch.from_numpy(whole)

"""What a batch looked like when it was handed over. Pure; knows no torch."""

from collections.abc import Sequence

import numpy as np

from flashflow.packing import MicroBatch
from flashflow.records import Manifest, ManifestRow
from flashflow.trainers.scorable import is_scorable
from flashflow.trainers.share import groups_without_signal

UNMEASURED = {
    **dict.fromkeys(("r_mean", "r_max", "w_mean", "w_max", "rho_mean", "rho_max"), 1.0),
    **dict.fromkeys(("mismatch_k3", "clip_fraction", "entropy"), 0.0),
}
"""What a batch says of ratios when nothing in it is trained (`empty_batch`), as of weights that are the same."""


def batch_metrics(manifest: Manifest) -> dict[str, float]:
    """Rewards, response lengths and staleness of the batch; rewards over scorable rows, lengths over all.

    Of fresh rows; replayed ones, where there is nothing else, stand in for them in all but the staleness.

    reward_std is the population's. staleness = trainer's version at hand-over minus the row's oldest version, of rows
    that sampled a token; `staleness_{n}` is the share of those rows with staleness n.
    """
    metrics: dict[str, float] = {}
    fresh = [row for row in manifest.rows if row.use == 1]
    rows = fresh or manifest.rows
    rewards = [row.reward for row in rows if row.reward is not None and is_scorable(row)]
    if rewards:
        metrics |= {"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
    lengths = [row.num_sampled for row in rows]
    metrics |= {
        "response_length_mean": float(np.mean(lengths)),
        "response_length_max": float(max(lengths)),
        "truncated_fraction": _share([row.outcome == "truncated" for row in rows]),
        "failed_fraction": _share([not is_scorable(row) for row in rows]),
        "no_signal_fraction": _without_signal(rows),
        "num_samples": float(len(manifest.rows)),
    }
    return metrics | _staleness(manifest.step - 1, fresh)


def packing_metrics(micro_batches: Sequence[MicroBatch], lengths: Sequence[int]) -> dict[str, float]:
    """Over all ranks. padding_fraction: share of the tokens computed that are padding. lengths: of the batch's rows."""
    computed = sum(micro_batch.padded_tokens for micro_batch in micro_batches)
    real = sum(lengths[row] for micro_batch in micro_batches for row in micro_batch.rows)
    return {
        "num_micro_batches": float(len(micro_batches)),
        "padding_fraction": 1 - real / computed if computed else 0.0,
    }


def _without_signal(rows: Sequence[ManifestRow]) -> float:
    groups = {row.sample.group for row in rows}
    return len(groups_without_signal(rows)) / len(groups) if groups else 0.0


def _staleness(version: int, rows: Sequence[ManifestRow]) -> dict[str, float]:
    ages = [version - row.initiating_version for row in rows if row.num_sampled]
    if not ages:
        return {}
    shares = {f"staleness_{age}": ages.count(age) / len(ages) for age in sorted(set(ages))}
    return {"staleness_mean": float(np.mean(ages)), "staleness_max": float(max(ages)), **shares}


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0

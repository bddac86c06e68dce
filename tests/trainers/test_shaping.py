"""Long responses in the trainer: the penalty reaches the advantage only, and truncated rows may be left out."""

import msgspec
import numpy as np
import pytest
import torch
from trainer_cases import make_manifest, make_trajectory

from flashflow.algorithms.settings import NO_SHAPING, AdvantageConfig, LossConfig, ShapingConfig
from flashflow.records import SampleId
from flashflow.trainers.batch import consume
from flashflow.trainers.metrics import batch_metrics
from flashflow.trainers.shaping import shaped_reward
from flashflow.trainers.share import whole

DR_GRPO = AdvantageConfig(estimator="dr_grpo")


def rows_of(*lengths_and_rewards, group=0):
    rng = np.random.default_rng(0)
    return [
        make_trajectory(SampleId(group, member), prompt=3, response=length, rng=rng, reward=reward)
        for member, (length, reward) in enumerate(lengths_and_rewards)
    ]


def truncated(row):
    return msgspec.structs.replace(row, outcome="truncated")


def consumed_of(rows, shaping=NO_SHAPING):
    named = make_manifest(1, rows, len(rows)).rows
    return consume(named, whole(rows, 1, 0), DR_GRPO, LossConfig(), total=lambda part: part, shaping=shaping)


def advantages(consumed):
    """Of the last token of each row."""
    return [float(row[row.nonzero()[-1]]) if row.any() else 0.0 for row in consumed.advantages_NT]


@pytest.mark.parametrize(("length", "shaped"), [(16, 1.0), (17, 0.75), (18, 0.5), (20, 0.0), (25, 0.0)])
def test_the_penalty_grows_over_the_cache_up_to_the_budget(length, shaped):
    (row,) = rows_of((length, 1.0))
    assert shaped_reward(row, ShapingConfig(budget=20, cache=4)) == shaped
    assert shaped_reward(row, NO_SHAPING) == 1.0


def test_a_row_without_reward_has_no_penalty_either():
    (row,) = rows_of((20, None))
    assert shaped_reward(row, ShapingConfig(budget=20, cache=4)) is None


def test_the_advantage_sees_the_penalty_and_the_raw_reward_stays():
    rows = rows_of((10, 1.0), (18, 1.0), (20, 0.0), (5, 0.0))
    consumed = consumed_of(rows, shaping=ShapingConfig(budget=20, cache=4))
    # Shaped 1, 0.5, -1, 0: the mean is 0.125.
    assert advantages(consumed) == pytest.approx([0.875, 0.375, -1.125, -0.125])
    assert consumed.rewards_N.tolist() == [1.0, 1.0, 0.0, 0.0]
    metrics = batch_metrics(make_manifest(1, rows, 4))
    assert metrics["reward_mean"] == 0.5
    assert metrics["no_signal_fraction"] == 0.0


def test_truncated_rows_are_left_out_of_everything_but_the_baseline():
    rows = rows_of((10, 1.0), (18, 1.0), (20, 0.0), (5, 1.0))
    rows[2] = truncated(rows[2])
    consumed = consumed_of(rows, shaping=ShapingConfig(mask_truncated=True))
    assert advantages(consumed) == pytest.approx([0.25, 0.25, 0.0, 0.25])
    assert consumed.counted_rows == [0, 1, 3]
    assert consumed.num_tokens == 10 + 18 + 5
    plain = consumed_of(rows)
    assert plain.counted_rows == [0, 1, 2, 3]
    assert plain.num_tokens == 10 + 18 + 20 + 5


def test_a_batch_of_truncated_rows_alone_has_nothing_to_train():
    rows = [truncated(row) for row in rows_of((10, 1.0), (10, 0.0))]
    consumed = consumed_of(rows, shaping=ShapingConfig(mask_truncated=True))
    assert (consumed.counted_rows, consumed.num_tokens) == ([], 0)
    assert not torch.any(consumed.advantages_NT)


def test_replayed_rows_do_not_enter_the_staleness_and_the_reward_of_fresh_ones():
    fresh, old = rows_of((4, 0.0), (4, 1.0), group=5), rows_of((9, 1.0), (9, 1.0), group=2)
    rows = [msgspec.structs.replace(row, versions=np.where(row.mask, 6, -1).astype(np.int32)) for row in fresh] + old
    manifest = make_manifest(8, rows, 2)
    slots = [msgspec.structs.replace(row, use=2) if row.sample.group == 2 else row for row in manifest.rows]
    metrics = batch_metrics(msgspec.structs.replace(manifest, rows=slots))
    assert (metrics["staleness_max"], metrics["staleness_1"]) == (1.0, 1.0)
    assert (metrics["reward_mean"], metrics["response_length_mean"], metrics["num_samples"]) == (0.5, 4.0, 4.0)
    alone = make_manifest(8, old, 2)
    alone = msgspec.structs.replace(alone, rows=[msgspec.structs.replace(row, use=2) for row in alone.rows])
    assert batch_metrics(alone)["reward_mean"] == 1.0
    assert "staleness_max" not in batch_metrics(alone)

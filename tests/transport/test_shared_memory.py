"""Staging weights in shared memory and mapping them elsewhere."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from flashflow.errors import WeightsError
from flashflow.records import SharedWeights, TensorSpec
from flashflow.transport.weights.digest import CHUNK_WORDS, digest
from flashflow.transport.weights.plan import TensorInfo, plan_segment
from flashflow.transport.weights.segment import FOLDER, create_segment, remove_segments
from flashflow.transport.weights.shared_memory import WeightStage, attach

READER = """
import sys, msgspec
from flashflow.records import SharedWeights
from flashflow.transport.weights.shared_memory import attach
weights = msgspec.json.decode(sys.argv[1], type=SharedWeights)
attached = attach(weights)
attached.verify()
print({name: tensor.double().sum().item() for name, tensor in attached.tensors.items()}, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    yield run_id
    assert remove_segments(run_id) == [], "the test left segments behind"


def segments(run_id: str) -> list[str]:
    return sorted(path.name for path in FOLDER.glob(f"flashflow-{run_id}-*"))


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(5, 7, generator=generator),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "counts": torch.arange(-3, 4, dtype=torch.int64),
        "flags": torch.tensor([1, 0, 255], dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.zeros(0, 4),
        "transposed": torch.randn(4, 6, generator=generator).t(),
    }


def independent_digest(raw: bytes) -> int:
    padded = raw + bytes(-len(raw) % 4)
    return int(np.frombuffer(padded, "<i4").sum(dtype=np.int64)) % 2**63


def start_reader(weights: SharedWeights) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", READER, msgspec.json.encode(weights).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_every_dtype_and_shape_comes_back_to_the_last_bit(run_id: str) -> None:
    stage = WeightStage(run_id)
    tensors = some_tensors()
    weights = stage.stage(3, tensors)
    attached = attach(weights)
    attached.verify()
    assert attached.version == 3
    assert list(attached.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert attached.tensors[name].dtype == tensor.dtype
        assert attached.tensors[name].shape == tensor.shape
        assert torch.equal(attached.tensors[name], tensor), name
    stage.close()


def test_every_view_starts_on_a_cache_line_and_none_overlap(run_id: str) -> None:
    stage = WeightStage(run_id)
    weights = stage.stage(0, some_tensors())
    ends = 0
    for spec in weights.tensors:
        assert spec.offset % 64 == 0
        assert spec.offset >= ends
        ends = spec.offset + some_tensors()[spec.name].nbytes
    assert weights.nbytes >= ends
    assert all(view.data_ptr() % 64 == 0 for view in attach(weights).tensors.values())
    stage.close()


def test_of_tied_names_only_the_first_is_staged_and_equal_values_are_not_tied(run_id: str) -> None:
    embedding = torch.ones(6, 4)
    tied = {"embed": embedding, "head": embedding.view(6, 4), "other": torch.ones(6, 4)}
    stage = WeightStage(run_id)
    assert [spec.name for spec in stage.stage(0, tied).tensors] == ["embed", "other"]
    stage.close()


def test_parts_of_one_storage_are_tensors_of_their_own(run_id: str) -> None:
    fused = torch.arange(12.0).view(6, 2)
    stage = WeightStage(run_id)
    weights = stage.stage(0, {"upper": fused[:3], "lower": fused[3:], "all": fused})
    attached = attach(weights)
    assert torch.equal(attached.tensors["lower"], fused[3:])
    assert torch.equal(attached.tensors["all"], fused)
    stage.close()


def test_two_segments_take_turns_so_the_previous_version_stays_whole(run_id: str) -> None:
    stage = WeightStage(run_id)
    tensor = torch.zeros(1000)
    first = stage.stage(0, {"w": tensor})
    old = attach(first)
    second = stage.stage(1, {"w": tensor + 1})
    assert first.segment != second.segment
    old.verify()
    assert old.tensors["w"].sum() == 0
    assert attach(second).tensors["w"].sum() == 1000
    third = stage.stage(2, {"w": tensor + 2})
    assert third.segment == first.segment
    assert len(segments(run_id)) == 2
    stage.close()


def test_a_view_of_an_overwritten_version_fails_its_digest_by_name(run_id: str) -> None:
    stage = WeightStage(run_id)
    first = stage.stage(0, {"kept": torch.ones(8), "changed": torch.ones(8)})
    old = attach(first)
    stage.stage(1, {"kept": torch.ones(8), "changed": torch.ones(8)})
    stage.stage(2, {"kept": torch.ones(8), "changed": torch.full((8,), 1.5)})
    with pytest.raises(WeightsError, match="'changed' of version 0"):
        old.verify()
    stage.close()


def test_what_a_reader_writes_never_reaches_the_segment(run_id: str) -> None:
    stage = WeightStage(run_id)
    weights = stage.stage(0, {"w": torch.ones(64)})
    attach(weights).tensors["w"].zero_()
    attach(weights).verify()
    stage.close()


def test_views_outlive_close_on_both_sides(run_id: str) -> None:
    stage = WeightStage(run_id)
    attached = attach(stage.stage(0, {"w": torch.arange(10_000.0)}))
    view = attached.tensors["w"]
    attached.close()
    stage.close()
    assert segments(run_id) == []
    assert view.sum() == 9_999 * 10_000 / 2


def test_a_larger_model_gets_new_segments_and_the_old_ones_go(run_id: str) -> None:
    stage = WeightStage(run_id)
    for version in range(4):
        weights = stage.stage(version, {"w": torch.full((100 * (version + 1),), float(version))})
        attach(weights).verify()
    assert len(segments(run_id)) == 2
    stage.close()


def test_gather_is_applied_to_each_tensor_before_its_copy(run_id: str) -> None:
    stage = WeightStage(run_id)
    weights = stage.stage(0, {"w": torch.ones(3)}, gather=lambda name, tensor: tensor * 5)
    attached = attach(weights)
    attached.verify()
    assert attached.tensors["w"].tolist() == [5, 5, 5]
    stage.close()


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 7, 64, 4 * CHUNK_WORDS + 5])
def test_the_digest_is_the_sum_of_the_int32_view_with_a_zero_padded_tail(nbytes: int) -> None:
    raw = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    assert digest(torch.from_numpy(raw)) == independent_digest(raw.tobytes())


def test_a_negative_sum_is_taken_modulo_two_to_the_63() -> None:
    assert digest(torch.tensor([-1, -2], dtype=torch.int32)) == 2**63 - 3


def test_another_process_reads_the_weights_and_its_end_or_death_leaves_them(run_id: str) -> None:
    stage = WeightStage(run_id)
    weights = stage.stage(7, {"a": torch.arange(100.0), "b": torch.ones(3, dtype=torch.bfloat16)})
    ending, dying = start_reader(weights), start_reader(weights)
    for reader in (ending, dying):
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == "{'a': 4950.0, 'b': 3.0}"
    dying.send_signal(signal.SIGKILL)
    dying.communicate(timeout=30)
    ending.communicate("", timeout=30)
    assert (ending.returncode, dying.returncode) == (0, -signal.SIGKILL)
    attach(weights).verify()
    stage.close()


def test_attaching_to_what_is_gone_or_misdescribed_names_it(run_id: str) -> None:
    stage = WeightStage(run_id)
    weights = stage.stage(0, {"w": torch.ones(4)})
    replaced = msgspec.structs.replace
    with pytest.raises(WeightsError, match="announced"):
        attach(replaced(weights, nbytes=weights.nbytes * 2))
    with pytest.raises(WeightsError, match="'w' has the unknown dtype 'float33'"):
        attach(replaced(weights, tensors=[replaced(weights.tensors[0], dtype="float33")]))
    with pytest.raises(WeightsError, match="'far' lies at bytes 64"):
        attach(replaced(weights, tensors=[TensorSpec(name="far", dtype="float32", shape=[4], offset=64, digest=0)]))
    stage.close()
    with pytest.raises(WeightsError, match=f"no shared-memory segment '{weights.segment}'"):
        attach(weights)
    with pytest.raises(WeightsError, match="must match"):
        attach(replaced(weights, segment="../etc/passwd"))


def test_leftovers_of_a_killed_trainer_are_removed_and_other_runs_are_not_touched(run_id: str) -> None:
    longer = f"{run_id}-b"
    other = WeightStage(longer)
    kept = other.stage(0, {"w": torch.ones(4)})
    leftover = WeightStage(run_id).stage(0, {"w": torch.ones(4)})
    assert remove_segments(run_id) == [leftover.segment]
    attach(kept).verify()
    other.close()
    WeightStage(run_id).stage(0, {"w": torch.ones(4)})
    fresh = WeightStage(run_id)
    assert segments(run_id) == []
    fresh.close()


def test_a_segment_that_cannot_fit_is_refused_and_leaves_nothing(run_id: str) -> None:
    total = os.statvfs(FOLDER).f_blocks * os.statvfs(FOLDER).f_frsize
    with pytest.raises(WeightsError, match="two copies of the weights must fit"):
        create_segment(f"flashflow-{run_id}-big-0", total * 2)
    assert not Path(FOLDER / f"flashflow-{run_id}-big-0").exists()


def test_prefixes_that_would_blur_runs_are_refused() -> None:
    with pytest.raises(WeightsError, match="prefix 'a-b'"):
        WeightStage("run", "a-b")


def test_the_plan_refuses_a_name_given_twice_and_an_empty_model() -> None:
    info = TensorInfo("w", "float32", (3,), 4, 1)
    with pytest.raises(WeightsError, match="'w' occurs twice"):
        plan_segment([info, info])
    with pytest.raises(WeightsError, match="no tensors"):
        plan_segment([])


def test_the_plan_by_hand() -> None:
    infos = [TensorInfo("a", "float32", (3, 5), 4, 1), TensorInfo("b", "bfloat16", (32,), 2, 2)]
    plan = plan_segment([*infos, TensorInfo("tied", "float32", (3, 5), 4, 1), TensorInfo("c", "uint8", (1,), 1, 3)])
    assert [(p.info.name, p.offset, p.end) for p in plan.placements] == [("a", 0, 60), ("b", 64, 128), ("c", 128, 129)]
    assert plan.nbytes == 192


def test_a_fresh_stage_leaves_whole_what_a_slow_reader_still_has(run_id):
    stage = WeightStage(run_id)
    try:
        first = attach(stage.stage(1, {"w": torch.full((64,), 1.0)}))
        stage.stage(2, {"w": torch.full((64,), 2.0)})
        stage.stage(3, {"w": torch.full((64,), 3.0)}, fresh=True)
        first.verify()
        assert torch.equal(first.tensors["w"], torch.full((64,), 1.0))
        assert len(segments(run_id)) == 2
    finally:
        stage.close()

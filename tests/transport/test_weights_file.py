"""Staging weights as files and reading them elsewhere."""

from pathlib import Path

import msgspec
import pytest
import torch

from flashflow.errors import WeightsError
from flashflow.records import FileWeights, StagedWeights
from flashflow.transport.weights.carrier import attach, make_stage
from flashflow.transport.weights.file import FileStage
from tests.transport.test_shared_memory import some_tensors


def test_every_dtype_and_shape_comes_back_to_the_last_bit_through_the_message(tmp_path):
    stage = make_stage("run", tmp_path)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.stage(3, some_tensors())), type=StagedWeights)
    attached = attach(sent)
    attached.verify()
    assert sent.version == 3
    for name, tensor in some_tensors().items():
        assert torch.equal(attached.tensors[name], tensor), name
        assert attached.tensors[name].data_ptr() % 64 == 0


def test_tied_tensors_are_written_once_under_their_first_name_and_floats_in_the_wanted_dtype(tmp_path):
    shared = torch.randn(3, 4)
    tensors = {"embedding": shared, "head": shared, "count": torch.tensor([7])}
    attached = attach(FileStage(tmp_path, "run").stage(1, tensors, gather=lambda name, t: t, dtype=torch.bfloat16))
    assert {name: tensor.dtype for name, tensor in attached.tensors.items()} == {
        "embedding": torch.bfloat16,
        "count": torch.int64,
    }


def test_only_the_two_newest_are_kept_and_none_after_the_end(tmp_path):
    stage = FileStage(tmp_path, "run")
    staged = [stage.stage(version, {"w": torch.full((2,), float(version))}) for version in range(4)]
    assert [Path(weights.path).exists() for weights in staged] == [False, False, True, True]
    kept = attach(staged[3])
    stage.close()
    assert not (tmp_path / "run").exists()
    assert kept.tensors["w"].tolist() == [3.0, 3.0]
    with pytest.raises(WeightsError, match="a newer version has taken its place"):
        attach(staged[0])


def test_a_new_incarnation_of_the_run_removes_what_the_killed_one_left(tmp_path):
    left = FileStage(tmp_path, "run").stage(1, {"w": torch.zeros(1)})
    other = FileStage(tmp_path, "other").stage(1, {"w": torch.zeros(1)})
    FileStage(tmp_path, "run")
    assert (Path(left.path).exists(), Path(other.path).exists()) == (False, True)


def test_a_damaged_file_is_found(tmp_path):
    weights = FileStage(tmp_path, "run").stage(2, {"a": torch.ones(4), "b": torch.ones(4)})
    path = Path(weights.path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(WeightsError, match="tensor 'b' of version 2: digest"):
        attach(weights).verify()
    path.write_bytes(raw[:20])
    with pytest.raises(WeightsError, match="is damaged"):
        attach(weights)


def test_names_must_be_those_announced(tmp_path):
    weights = FileStage(tmp_path, "run").stage(2, {"a": torch.ones(4)})
    wrong = FileWeights(version=2, path=weights.path, digests={"b": 0})
    with pytest.raises(WeightsError, match="a, b announced or stored, not both"):
        attach(wrong).verify()

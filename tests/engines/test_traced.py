"""A traced function gives what the function gives, or steps aside."""

import logging

import pytest
import torch

from flashflow.engines.embedded.traced import Traced
from tests.engines.engine_cases import drain, make_engine, mates, tiny


class Adds(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight + self.extra(x)

    def extra(self, x):
        return 1.0


class Branches(Adds):
    def extra(self, x):
        return 1.0 if x.sum() > 0 else -1.0


class CountsRows(Adds):
    """Takes a number from the shape where no warning tells."""

    def extra(self, x):
        return float(torch.empty(tuple(x.shape)).numpy().shape[0])


@torch.inference_mode()
def test_a_trace_is_checked_once_for_every_shape_and_follows_new_weights():
    module = Adds()
    traced = Traced("adding", module)
    for rows in (2, 4, 2, 4, 2):
        assert torch.equal(traced(rows, torch.ones(rows, 3)), torch.full((rows, 3), 2.0))
    assert traced.enabled
    assert module.calls == 1 + 2, "traced, then checked with 2 and 4 rows"
    module.weight.data = torch.full((3,), 5.0)
    assert torch.equal(traced(2, torch.ones(2, 3)), torch.full((2, 3), 6.0))


@torch.inference_mode()
def test_a_function_that_branches_on_a_value_is_not_replayed(caplog):
    traced = Traced("branching", Branches())
    assert torch.equal(traced(1, torch.ones(1, 3)), torch.full((1, 3), 2.0))
    assert torch.equal(traced(1, -torch.ones(1, 3)), torch.full((1, 3), -2.0))
    assert not traced.enabled
    assert "branching runs without a trace" in caplog.text
    assert "depends on a value" in caplog.text


@torch.inference_mode()
def test_a_trace_that_differs_is_given_up_before_its_result_is_used(caplog):
    traced = Traced("counting", CountsRows())
    assert torch.equal(traced(1, torch.ones(1, 3)), torch.full((1, 3), 2.0))
    assert torch.equal(traced(2, torch.ones(2, 3)), torch.full((2, 3), 3.0))
    assert not traced.enabled


def test_the_engine_samples_the_same_with_and_without_traces(tmp_path, caplog):
    model = tiny(tmp_path)
    with caplog.at_level(logging.WARNING):
        traced = drain(make_engine(model), mates(24))
    assert not caplog.records
    assert traced == drain(make_engine(model, traced=False), mates(24))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_position_embeddings_that_change_with_the_length_are_not_traced(tmp_path, kind):
    from flashflow.engines.embedded.runner import _positions_are_static

    model = tiny(tmp_path)
    assert _positions_are_static(model)
    model.config.rope_parameters = {"rope_type": kind}
    assert not _positions_are_static(model)

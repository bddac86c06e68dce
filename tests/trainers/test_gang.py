"""Several ranks: what one does, with less talk than passes, each on rows of its own; checkpoints go between numbers."""

import pytest
import torch
from gang import FAMILIES, batch_of, play

pytestmark = pytest.mark.slow

OF_THE_CUT = ("num_micro_batches", "padding_fraction")


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return play(folder / "one", 1, "families")[0], play(folder / "two", 2, "families")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_have_the_losses_of_one_over_ten_steps(one_and_two, family):
    one, two = one_and_two
    for rank in two:
        for wanted, found in zip(one[family], rank[family], strict=True):
            # Losses that cancel to nothing are measured against advantages, which are of the order of 1.
            for name in ("loss", "value_loss"):
                assert found.get(name, 0.0) == pytest.approx(wanted.get(name, 0.0), rel=1e-5, abs=2e-7), name
            for name in ("grad_norm", "critic_grad_norm", "entropy"):
                assert found.get(name, 0.0) == pytest.approx(wanted.get(name, 0.0), rel=1e-5), name
            rest = {name: value for name, value in wanted.items() if name not in OF_THE_CUT}
            assert {name: found[name] for name in rest} == pytest.approx(rest, rel=1e-5, abs=2e-7)
    assert two[0] == two[1]


def test_gradients_are_reduced_once_a_step_however_many_passes(tmp_path):
    """A group of parameters is one of the two layers, or the rest."""
    for found in play(tmp_path, 2, "communication"):
        for dtype in ("float32", "bfloat16"):
            whole, layer_by_layer = found[dtype, True], found[dtype, False]
            assert whole["passes"] >= 6
            assert (whole["reductions"], whole["gathers"]) == (3, 3)
            rounds = layer_by_layer["reductions"] // 3
            assert rounds >= 3
            assert layer_by_layer["gathers"] >= 3 * rounds
            tolerance = 1e-6 if dtype == "float32" else 2e-3
            for name, tensor in whole["weights"].items():
                torch.testing.assert_close(tensor, layer_by_layer["weights"][name], rtol=0, atol=tolerance)


def test_a_checkpoint_of_two_ranks_resumes_on_one_two_and_three(tmp_path):
    saved = play(tmp_path, 2, "saving")[0]
    losses = []
    for num_ranks in (1, 2, 3):
        for state, metrics in play(tmp_path, num_ranks, "resuming"):
            assert list(state) == list(saved)
            assert [name for name, tensor in saved.items() if not torch.equal(state[name], tensor)] == []
            losses.append([metrics["loss"], metrics["value_loss"], metrics["grad_norm"]])
    for each in losses:
        assert each == pytest.approx(losses[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_asks_the_buffer_for_its_own_rows_alone(tmp_path, num_ranks):
    found = play(tmp_path, num_ranks, "fetching")
    asked = [samples for samples, _ in found]
    samples = [row.sample for row in batch_of(1)[1]]
    assert sorted(sample for each in asked for sample in each) == samples
    assert max(map(len, asked)) - min(map(len, asked)) <= 4
    assert all(metrics == found[0][1] for _, metrics in found)
    assert found[0][1]["num_samples"] == len(samples)

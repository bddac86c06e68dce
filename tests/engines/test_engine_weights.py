"""The embedded engine swaps weights whole between two steps, or refuses."""

import copy
import math

import pytest
import torch

from flashflow.engines.embedded.engine import TorchEngine
from flashflow.errors import ContractError, WeightsError
from tests.engines.engine_cases import VOCABULARY, drain, make_engine, only, prompt, request, tiny, weights_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    return weights_of(tiny(tmp_path_factory.mktemp("other"), seed=1))


@pytest.fixture
def engine(model):
    return make_engine(model)


def test_nothing_is_sampled_before_the_first_weights(model):
    engine = TorchEngine(copy.deepcopy(model), slots=8, max_context_tokens=64)
    assert engine.version == -1
    with pytest.raises(ContractError, match="no weights yet"):
        engine.submit(request("r", prompt(5, 0), 10))


@pytest.mark.parametrize("tied", [True, False])
def test_after_a_swap_samples_are_those_of_a_model_that_always_held_the_weights(tied, model, untied, tmp_path):
    old = model if tied else untied
    new = tiny(tmp_path, seed=1, tied=tied)
    engine = make_engine(old)
    before = drain(engine, [request("r", prompt(30, 0), 20)])
    staged = weights_of(new)
    assert ("lm_head.weight" in staged) is not tied
    engine.load(3, staged)
    assert engine.version == 3
    swapped, fresh = (
        drain(engine, [request("r", prompt(30, 0), 20)]),
        drain(make_engine(new), [request("r", prompt(30, 0), 20)]),
    )
    assert swapped["r"].tokens == fresh["r"].tokens != before["r"].tokens
    assert swapped["r"].logprobs == fresh["r"].logprobs
    assert swapped["r"].versions == [3] * 20


def test_the_engine_reads_the_staged_tensors_themselves(model, other_weights):
    engine = make_engine(model)
    staged = {name: tensor.clone() for name, tensor in other_weights.items()}
    engine.load(1, staged)
    first = only(drain(engine, [request("r", prompt(30, 0), 5)]))
    for tensor in staged.values():
        tensor.zero_()
    second = only(drain(engine, [request("r", prompt(30, 0), 5)]))
    assert second.logprobs == pytest.approx([-math.log(VOCABULARY)] * 5, abs=1e-6) != first.logprobs


def test_a_running_request_goes_on_over_a_swap_and_every_token_names_its_version(engine, other_weights):
    old = drain(engine, [request("r", prompt(30, 0), 20)])["r"]
    answers = drain(engine, [request("r", prompt(30, 0), 20)], {8: lambda: engine.load(2, other_weights)})
    assert answers["r"].versions == [0] * 8 + [2] * 12
    assert answers["r"].tokens[:8] == old.tokens[:8]
    assert answers["r"].logprobs[8:] != old.logprobs[8:]


def test_a_prompt_computed_by_older_weights_is_not_shared_with_newer_requests(engine, model, other_weights):
    new = copy.deepcopy(model)
    new.load_state_dict(other_weights, strict=False)
    new.tie_weights()

    def swap_and_submit():
        engine.load(1, other_weights)
        engine.submit(request("new", prompt(30, 0), 10, member=1))

    answers = drain(engine, [request("old", prompt(30, 0), 20)], {5: swap_and_submit})
    expected = only(drain(make_engine(new), [request("new", prompt(30, 0), 10, member=1)]))
    assert answers["new"].tokens == expected.tokens
    assert answers["new"].logprobs == expected.logprobs


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(VOCABULARY, 32)}), "lm_head.weight is unknown"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(31)}),
            r"model.norm.weight has shape \[31\], expected \[32\]",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(32, dtype=torch.bfloat16)}),
            "model.norm.weight is torch.bfloat16, expected torch.float32",
        ),
    ],
    ids=["missing", "unknown", "misshapen", "dtype"],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine, other_weights, spoil, message):
    before = drain(engine, [request("r", prompt(30, 0), 10)])
    spoilt = dict(other_weights)
    spoil(spoilt)
    with pytest.raises(WeightsError, match=message):
        engine.load(1, spoilt)
    assert engine.version == 0
    assert drain(engine, [request("r", prompt(30, 0), 10)]) == before


def test_diverged_weights_stop_the_engine_instead_of_giving_tokens(engine, other_weights):
    diverged = {**other_weights, "model.norm.weight": torch.full((32,), math.nan)}
    engine.load(4, diverged)
    engine.submit(request("r", prompt(5, 0), 10))
    with pytest.raises(ContractError, match="request r: logits at version 4 are not finite"):
        engine.step()

"""The embedded engine on a random 30,000-parameter model: samples, their independence of mates, and weights."""

import copy
import math

import numpy as np
import pytest
import torch

from flashflow.engines.embedded.engine import TorchEngine
from flashflow.errors import ConfigError, ContractError, WeightsError
from flashflow.messages import SamplingKey
from flashflow.shapes import safe_length
from tests.engines.engine_cases import (
    VOCABULARY,
    drain,
    make_engine,
    mates,
    only,
    plain_logprobs,
    prompt,
    request,
    tiny,
    weights_of,
)
from tests.tiny_model import make_tiny_tokenizer


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


@pytest.fixture
def exact_engine(engine):
    if not engine.exact:
        pytest.skip("this machine's arithmetic depends on shapes, as the probe found")
    return engine


def watched_request(length, max_new_tokens):
    return request("watched", prompt(length, 0), max_new_tokens, temperature=0.8)


@pytest.fixture(
    scope="module",
    params=[watched_request(5, 40), watched_request(50, 40), watched_request(110, 60)],
    ids=["short", "past 64", "past 128"],
)
def watched(request, model):
    """A request and its answer from an engine of its own."""
    return request.param, only(drain(make_engine(model), [request.param]))


# ---- one sample is what it is, whoever is beside it


def test_a_sample_is_the_same_among_31_mates_as_alone(exact_engine, watched):
    watched_request, alone = watched
    answers = drain(exact_engine, [*mates(20), watched_request, *mates(31)[20:]])
    assert answers["watched"] == alone
    assert len(answers) == 32


def test_a_sample_is_the_same_when_it_joins_late(exact_engine, watched):
    watched_request, alone = watched
    answers = drain(exact_engine, mates(20), {30: lambda: exact_engine.submit(watched_request)})
    assert answers["watched"] == alone


def test_a_sample_is_the_same_after_it_moved_to_a_lower_slot(exact_engine, watched):
    watched_request, alone = watched
    short = [request(f"short-{i}", prompt(9, i), 3, member=i) for i in range(31)]
    answers = drain(exact_engine, [*short, watched_request])
    assert answers["watched"] == alone


def test_a_sample_is_the_same_after_its_mates_were_aborted(exact_engine, watched):
    watched_request, alone = watched

    def abort():
        for i in range(0, 25, 2):
            exact_engine.abort(f"mate-{i}")

    answers = drain(exact_engine, [*mates(25), watched_request], {2: abort})
    assert answers["watched"] == alone
    assert answers["mate-0"].finish_reason == "aborted"


def test_members_of_a_group_share_the_prompt_and_sample_as_if_alone(exact_engine, model):
    members = [request(f"m{i}", prompt(40, 0), 20, member=i) for i in range(8)]
    together = drain(exact_engine, members)
    assert len({tuple(answer.tokens) for answer in together.values()}) == 8
    for member in members:
        assert only(drain(make_engine(model), [member])) == together[member.request]


def test_a_sample_that_lost_its_engine_goes_on_as_if_nothing_had_happened(exact_engine, watched):
    watched_request, whole = watched
    for done in (1, 17, len(whole.tokens) - 1):
        ids = watched_request.prompt_ids
        moved = request(
            "moved", ids, watched_request.max_new_tokens, temperature=0.8, generated_ids=whole.tokens[:done]
        )
        rest = drain(exact_engine, [*mates(5), moved])["moved"]
        assert rest.tokens == whole.tokens[done:]
        assert rest.logprobs == whole.logprobs[done:]
        assert rest.finish_reason == "length"


def test_the_draw_depends_on_the_key(engine):
    keys = {
        "same": SamplingKey(0, 0, 0, 0, 0),
        "same again": SamplingKey(0, 0, 0, 0, 0),
        "member": SamplingKey(0, 0, 1, 0, 0),
        "retry": SamplingKey(0, 0, 0, 1, 0),
        "turn": SamplingKey(0, 0, 0, 0, 1),
    }
    answers = drain(engine, [request(name, prompt(12, 0), 20, key=key) for name, key in keys.items()])
    assert answers["same"] == answers["same again"]
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 4


# ---- log-probabilities


def test_logprobs_are_those_of_a_plain_forward(engine, model, watched):
    watched_request, answer = watched
    tokens = [*watched_request.prompt_ids.tolist(), *answer.tokens]
    plain = plain_logprobs(model, tokens, padded_to=len(tokens), temperature=0.8)[-len(answer.tokens) :]
    assert answer.logprobs == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(("length", "new"), [(1, 15), (7, 20), (30, 50), (60, 70), (100, 60), (200, 250), (520, 20)])
def test_logprobs_equal_a_right_padded_forward_to_the_last_bit(model, length, new):
    engine = make_engine(model, max_context_tokens=600)
    if not engine.exact:
        pytest.skip("this machine's arithmetic depends on shapes, as the probe found")
    answer = drain(engine, [*mates(3), request("r", prompt(length, 0), new)])["r"]
    tokens = [*prompt(length, 0), *answer.tokens]
    plain = plain_logprobs(model, tokens, padded_to=safe_length(len(tokens)))
    assert answer.logprobs == plain[-new:]


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_1(engine, model):
    greedy = request("g", prompt(20, 0), 12, temperature=0.0)
    answer = drain(engine, [greedy, *mates(3)])["g"]
    tokens = [*prompt(20, 0), *answer.tokens]
    logits = model(torch.tensor([tokens])).logits.detach()[0]
    assert answer.tokens == logits[19:-1].argmax(-1).tolist()
    assert answer.logprobs == pytest.approx(plain_logprobs(model, tokens, padded_to=32)[-12:], abs=1e-5)


def test_another_architecture_is_served_by_its_own_layers(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=256, initializer_range=0.1, attention_bias=True,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()
    answer = only(drain(make_engine(llama), [request("r", prompt(30, 0), 30)]))
    tokens = [*prompt(30, 0), *answer.tokens]
    assert answer.logprobs == pytest.approx(plain_logprobs(llama, tokens, padded_to=60)[-30:], abs=1e-5)


def test_attention_the_engine_lacks_is_refused_by_name(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, sliding_window=64,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="sliding_window 64 below the context of 512 tokens"):
        make_engine(MistralForCausalLM(config).eval())


# ---- the end of a request


def test_a_stop_id_ends_the_request_and_is_kept(engine):
    free = drain(engine, [request("free", prompt(12, 0), 40)])["free"]
    stop = free.tokens[10]
    first = free.tokens.index(stop)
    answer = drain(engine, [request("stopped", prompt(12, 0), 40, stop_ids=[VOCABULARY + 5, stop])])["stopped"]
    assert answer.tokens == free.tokens[: first + 1]
    assert answer.finish_reason == "stop"


def test_a_stop_string_across_tokens_ends_the_request_with_the_token_that_completes_it(engine):
    free = drain(engine, [request("free", prompt(12, 0), 60)])["free"]
    decode = make_tiny_tokenizer().decode
    place = next(i for i in range(8, 58) if "\ufffd" not in decode(free.tokens[i : i + 2]))
    text = decode(free.tokens[place : place + 2])
    assert text not in decode(free.tokens[: place + 1])
    strings = ["never to be seen", text]
    stopped = drain(engine, [request("stopped", prompt(12, 0), 60, stop_strings=strings), *mates(2)])["stopped"]
    assert stopped.tokens == free.tokens[: place + 2]
    assert stopped.finish_reason == "stop"
    halved = request("halved", prompt(12, 0), 60, stop_strings=strings, generated_ids=free.tokens[: place + 1])
    assert drain(engine, [halved])["halved"].tokens == [free.tokens[place + 1]]


def test_the_budget_ends_the_request(engine):
    answer = only(drain(engine, [request("r", prompt(12, 0), 7)]))
    assert (len(answer.tokens), answer.finish_reason) == (7, "length")
    assert answer.versions == [0] * 7


def test_an_aborted_request_ends_before_the_next_step_and_frees_its_slot(engine):
    for one in [request("a", prompt(5, 0), 50), *mates(31), request("next", prompt(5, 1), 4)]:
        engine.submit(one)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (32, 1)
    engine.abort("a")
    news = engine.step()
    assert [(s.token, s.finish_reason) for s in news if s.request == "a"] == [(-1, "aborted")]
    assert any(s.request == "next" and s.token >= 0 for s in news)


def test_a_waiting_request_can_be_aborted_and_an_unknown_one_ignored(engine):
    engine.submit(request("a", prompt(5, 0), 50))
    engine.abort("a")
    engine.abort("unknown")
    assert [(s.request, s.token, s.finish_reason) for s in engine.step()] == [("a", -1, "aborted")]
    assert engine.step() == []
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_requests_beyond_the_slots_wait_their_turn(model):
    engine = make_engine(model, slots=8)
    for one in mates(20):
        engine.submit(one)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (8, 12)
    answers = drain(engine)
    assert len(answers) == 20
    assert all(answer.finish_reason == "length" for answer in answers.values())


def test_a_name_is_free_again_once_its_request_has_ended(engine):
    first = only(drain(engine, [request("r", prompt(5, 0), 4)]))
    assert only(drain(engine, [request("r", prompt(5, 0), 4)])) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 245}, "max_new_tokens are 257 tokens, engine.max_context_tokens is 256"),
        ({"generated_ids": [5, 6], "max_new_tokens": 2}, "max_new_tokens 2 is used up by 2 generated_ids"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [3, VOCABULARY]}, "outside the vocabulary 0 .. 258"),
        ({"temperature": -0.5}, "temperature -0.5"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"stop_strings": [""]}, "a stop string is empty"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(engine, changes, message):
    fields = {"prompt_ids": prompt(12, 0), "max_new_tokens": 10, **changes}
    with pytest.raises(ContractError, match=message):
        engine.submit(request("r", **fields))
    assert engine.num_waiting == 0


def test_a_name_in_use_is_refused(engine):
    engine.submit(request("r", prompt(5, 0), 10))
    with pytest.raises(ContractError, match="request r: the id is in use"):
        engine.submit(request("r", prompt(5, 0), 10))


def test_stop_strings_without_a_tokenizer_are_refused(model):
    with pytest.raises(ContractError, match="need an engine with a tokenizer"):
        make_engine(model, tokenizer=None).submit(request("r", prompt(5, 0), 10, stop_strings=["x"]))


# ---- weights


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


# ---- the probe and the limits


class SeesTheBatch(torch.nn.Module):
    """A head whose logits depend on how many rows are computed together."""

    def __init__(self, head):
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden):
        return hidden @ self.weight.T + 1e-6 * hidden.shape[0]


def test_the_probe_finds_arithmetic_that_sees_the_batch(untied):
    seeing = copy.deepcopy(untied)
    seeing.lm_head = SeesTheBatch(seeing.lm_head)
    assert not make_engine(seeing).exact
    with pytest.raises(
        ConfigError, match="engine.batch_invariant: true, but .* differ in a full batch than alone, by up to"
    ):
        make_engine(seeing, batch_invariant=True)


def test_a_context_beyond_the_models_positions_is_refused(model):
    with pytest.raises(ConfigError, match="max_context_tokens: 2000 exceeds the model's max_position_embeddings 1024"):
        make_engine(model, max_context_tokens=2000)


def test_the_whole_context_can_be_used(model):
    engine = make_engine(model, max_context_tokens=129, slots=8)
    answer = only(drain(engine, [request("r", prompt(1, 0), 128)]))
    assert len(answer.tokens) == 128
    assert np.isfinite(answer.logprobs).all()

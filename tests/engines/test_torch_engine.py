"""The embedded engine on a random 30,000-parameter model: samples, their independence of mates, and weights."""

import copy

import numpy as np
import pytest
import torch

from flashflow.errors import ConfigError
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
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("untied"), tied=False)


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
        ConfigError, match=r"engine.batch_invariant: true, but .* differ in a full batch than alone, by up to"
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

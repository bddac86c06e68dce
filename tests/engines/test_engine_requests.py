"""How a request to the embedded engine ends, waits, or is refused."""

import math

import pytest

from flashflow.errors import ContractError
from tests.engines.engine_cases import VOCABULARY, drain, make_engine, mates, only, prompt, request, tiny
from tests.tiny_model import make_tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tied"))


@pytest.fixture
def engine(model):
    return make_engine(model)


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

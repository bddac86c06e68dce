"""The memory of running requests' keys and values: bounded, shared within a group, kept after its request.

The random model has 256 bytes a token: 2 layers x keys and values x 2 heads x 8 numbers of 4 bytes.
"""

import numpy as np
import pytest
import torch

from flashflow.engines.embedded.kv_cache import CacheShape, SlotCache
from flashflow.engines.embedded.prefixes import Prefixes
from flashflow.errors import ConfigError, ContractError
from tests.engines.engine_cases import drain, make_engine, mates, only, prompt, request, tiny, weights_of

TOKEN_BYTES = 256
LONG = 512
"""Tokens of a slot that may hold more than 128."""
TWO_LONG = (2 * LONG + 1) * TOKEN_BYTES


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tied"))


class Watched:
    """An engine that notes how much memory its cache takes and how many requests run, step by step."""

    def __init__(self, engine):
        self._engine = engine
        self.cache_bytes, self.running, self.lengths = [], [], []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self):
        news = self._engine.step()
        cache = self._engine._runner.cache
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in cache.rows}
        self.cache_bytes.append(sum(storage.nbytes() for storage in storages.values()))
        self.running.append(self._engine.num_running)
        self.lengths.append(cache.length)
        return news


class CountsPrefills:
    """How many prompts an engine computed: sees every call of its runner."""

    def __init__(self, engine):
        self._prefill, self.prompts, self.passes = engine._runner.prefill, 0, 0
        engine._runner.prefill = self

    def __call__(self, slots, sequences):
        self.prompts += len(slots)
        self.passes += 1
        self._prefill(slots, sequences)


def mixed(count):
    """Every fifth of the first half may come to more than 128 tokens, the rest to 75 .. 120."""
    return [
        request(f"r-{i}", prompt(65 + i % 25, i), 65 if i < count / 2 and i % 5 == 0 else 10 + 7 * i % 20, member=i)
        for i in range(count)
    ]


# ---- the bound


def test_fifty_requests_in_the_memory_of_two_long_ones_are_all_answered_bit_for_bit(model):
    free = drain(make_engine(model), mixed(50))
    engine = Watched(make_engine(model, kv_cache_bytes=TWO_LONG))
    answers = drain(engine, mixed(50))
    assert answers == free
    assert len(answers) == 50
    assert max(engine.cache_bytes) <= TWO_LONG
    assert max(n for n, length in zip(engine.running, engine.lengths, strict=True) if length == LONG) == 2
    assert max(n for n, length in zip(engine.running, engine.lengths, strict=True) if length == 128) == 8


def test_without_a_bound_the_cache_is_what_the_slots_need_and_one_scratch_token(model):
    engine = Watched(make_engine(model, slots=8))
    drain(engine, mixed(3))
    assert set(engine.cache_bytes) == {(8 * LONG + 1) * TOKEN_BYTES}
    assert set(engine.lengths) == {LONG}


def test_short_requests_run_together_where_only_one_long_one_would(model):
    engine = Watched(make_engine(model, kv_cache_bytes=(LONG + 1) * TOKEN_BYTES))
    drain(engine, [request(f"s-{i}", prompt(10, i), 20, member=i) for i in range(20)])
    assert engine.running[0] == LONG // 64 == 8


def test_a_long_request_waits_for_room_and_the_short_ones_behind_it_with_it(model):
    engine = make_engine(model, kv_cache_bytes=TWO_LONG)
    short = [request(f"s-{i}", prompt(10, i), 20 + i, member=i) for i in range(4)]
    for one in [*short, request("long", prompt(10, 9), 200, member=9), request("behind", prompt(10, 8), 5, member=8)]:
        engine.submit(one)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (4, 2)
    for name in ("s-0", "s-1", "s-2"):
        engine.abort(name)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    assert {name: len(answer.tokens) for name, answer in drain(engine).items()} == {"s-3": 21, "long": 199, "behind": 5}


def test_the_bound_holds_over_aborts_and_weight_swaps(model):
    engine = Watched(make_engine(model, kv_cache_bytes=TWO_LONG))
    requests = mixed(30)

    def abort(names):
        for name in names:
            engine.abort(name)

    disturbances = {
        3: lambda: abort(["r-0", "r-7"]),
        10: lambda: engine.load(1, weights_of(model)),
        12: lambda: abort([f"r-{i}" for i in range(10, 20)]),
    }
    answers = drain(engine, requests, disturbances)
    free = drain(make_engine(model), requests)
    whole = {name: answer for name, answer in answers.items() if answer.finish_reason != "aborted"}
    assert len(answers) == 30
    assert len(whole) >= 18
    for name, answer in whole.items():
        assert (answer.tokens, answer.logprobs) == (free[name].tokens, free[name].logprobs)
    assert max(engine.cache_bytes) <= TWO_LONG


def test_a_bound_that_cannot_hold_the_longest_context_is_refused_at_the_start(model):
    needed = (LONG + 1) * TOKEN_BYTES
    make_engine(model, kv_cache_bytes=needed)
    with pytest.raises(ConfigError, match=rf"kv_cache_bytes: {needed - 1} is less than .* 256 needs: .*, {needed};"):
        make_engine(model, kv_cache_bytes=needed - 1)


def test_a_request_that_can_never_fit_is_refused_when_it_comes(model):
    engine = make_engine(model, kv_cache_bytes=(LONG + 1) * TOKEN_BYTES)
    with pytest.raises(ContractError, match=r"are 262 tokens, engine.max_context_tokens is 256"):
        engine.submit(request("r", prompt(12, 0), 250))
    assert engine.num_waiting == 0


def test_slots_of_another_length_keep_what_the_running_ones_hold():
    cache = SlotCache(CacheShape(1, 2, 4, torch.float32), 8 * 64 + 1, 64, torch.device("cpu"))
    places = cache.places(np.array([0, 2]), np.arange(5)[None])
    values = torch.arange(places.numel() * 4.0).view(-1, 4)
    for rows in cache.rows:
        rows.index_copy_(0, places, values)
    before = [view[[0, 2]].clone() for view in cache.views(3, 5)]
    cache.resize(128, 3, 5)
    assert cache.slots == 4
    for old, new in zip(before, cache.views(3, 5), strict=True):
        assert torch.equal(old, new[[0, 2]])
    assert torch.equal(cache.views(1, 5)[0][0, 1, 3], values[3 * 2 + 1]), "slot 0, head 1, position 3"


def test_what_a_free_row_computes_lands_outside_every_slot():
    cache = SlotCache(CacheShape(1, 2, 4, torch.float32), 2 * 64 + 1, 64, torch.device("cpu"))
    for rows in cache.rows:
        rows.index_fill_(0, cache.places(np.array([-1]), np.array([[0]])), 1.0)
    assert all(view.count_nonzero() == 0 for view in cache.views(2, 64))


# ---- a prompt is computed once


def test_a_group_that_comes_together_computes_its_prompt_once(model):
    engine = make_engine(model)
    counter = CountsPrefills(engine)
    drain(engine, [request(f"m{i}", prompt(40, 0), 5, member=i) for i in range(8)])
    assert counter.prompts == 1


def test_a_group_that_comes_one_by_one_computes_its_prompt_once_and_samples_as_if_alone(model):
    engine = make_engine(model)
    counter = CountsPrefills(engine)
    members = [request(f"m{i}", prompt(40, 0), 20, member=i) for i in range(8)]
    answers = {member.request: only(drain(engine, [member])) for member in members}
    assert counter.prompts == 1
    for member in members[:3]:
        assert only(drain(make_engine(model), [member])) == answers[member.request]


def test_the_prompt_stays_while_another_member_or_a_free_slot_holds_it(model):
    engine = make_engine(model)
    counter = CountsPrefills(engine)
    first, second, third = (request(f"m{i}", prompt(40, 0), 5 + 20 * i, member=i) for i in range(3))
    answers = drain(engine, [first, second, *mates(6)], {8: lambda: engine.submit(third)})
    assert counter.prompts == 1 + 6
    assert answers["m2"] == only(drain(make_engine(model), [third]))


def test_new_weights_compute_the_prompt_anew(model):
    engine = make_engine(model)
    counter = CountsPrefills(engine)
    drain(engine, [request("a", prompt(40, 0), 5)])
    engine.load(1, weights_of(model))
    drain(engine, [request("b", prompt(40, 0), 5)])
    assert counter.prompts == 2


def test_prompts_of_a_length_are_computed_in_one_pass(model):
    engine = make_engine(model)
    counter = CountsPrefills(engine)
    drain(engine, [request(f"r{i}", prompt(34 + i % 15, i), 3, member=i) for i in range(12)])
    assert (counter.prompts, counter.passes) == (12, 1)


def test_a_slot_taken_by_another_prompt_no_longer_counts_as_holding_the_first():
    prefixes = Prefixes()
    prefixes.put(3, b"a")
    prefixes.copy(3, 5)
    assert prefixes.slots_with(b"a") == {3, 5}
    prefixes.put(3, b"b")
    assert (prefixes.slots_with(b"a"), prefixes.slots_with(b"b")) == ({5}, {3})
    prefixes.copy(7, 5)
    assert prefixes.slots_with(b"a") == set()
    assert 5 not in prefixes

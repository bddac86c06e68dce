"""The choice of an engine and its room, without a proxy: loads, sessions, and an engine that runs less than it says."""

from collections import deque
from random import Random

import msgspec
import pytest

from flashflow.roles.routing import MAX_SESSIONS, EngineEnd, Router, work
from tests.roles.test_proxy import FakeEngine, generate


def engines_of(*slots):
    engines = [EngineEnd(f"engine-{index}", FakeEngine()) for index in range(len(slots))]
    router = Router(engines)
    for engine, count in zip(engines, slots, strict=True):
        engine.version = 0
        engine.greet(count)
        router.changed(engine)
    return engines, router


def test_the_choice_is_always_one_with_the_least_outstanding_tokens_among_those_that_may():
    random = Random(1)
    engines, router = engines_of(4, 4, 8, 8)
    held = []
    for number in range(5000):
        if held and random.random() < 0.5:
            engine, request = held.pop(random.randrange(len(held)))
            router.release(engine, work(request))
        if random.random() < 0.02:
            engine = random.choice(engines)
            engine.version = random.choice([-1, 0, 1, 2])
            router.changed(engine)
        request = generate(f"r{number}", new=random.randrange(1, 100), min_version=random.choice([0, 0, 0, 1]))
        fit = [e.outstanding_tokens for e in engines if e.serves(request) and e.has_room(1)]
        assert router.has_room == any(e.version >= 0 and e.has_room(1) for e in engines)
        engine = router.reserve([request])
        assert (engine is None) == (not fit)
        if engine is not None:
            assert engine.outstanding_tokens - work(request) == min(fit)
            held.append((engine, request))


def test_several_requests_at_once_need_so_many_free_slots_or_an_idle_engine():
    _, router = engines_of(8)
    requests = [generate(f"r{n}", session="s") for n in range(20)]
    assert router.reserve(requests) is not None
    assert router.reserve(requests[:1]) is None
    engines, router = engines_of(8)
    assert router.reserve(requests[:5]) is engines[0]
    assert router.reserve(requests[5:9]) is None
    assert router.reserve(requests[5:8]) is engines[0]


def test_the_least_recently_used_conversation_is_forgotten():
    (engine,), router = engines_of(8)
    request = generate("r")
    for number in range(MAX_SESSIONS + 10):
        router.release(router.reserve([msgspec.structs.replace(request, session=f"s{number}")]), work(request))
    assert router.num_sessions == MAX_SESSIONS
    assert engine.requests == engine.outstanding_tokens == 0


@pytest.mark.parametrize("running", [8, 16, 20])
def test_the_room_follows_an_engine_that_runs_another_number_than_its_slots(running):
    """An engine of 16 slots whose cache holds `running` requests; the proxy always has more of them."""
    (engine,), router = engines_of(16)
    held, count = deque(), 0
    waiting = []
    for _ in range(500):
        while (chosen := router.reserve([generate(f"r{count}")])) is not None:
            held.append(chosen)
            count += 1
        waiting.append(max(0, len(held) - 1 - running))
        held.popleft()
        router.release(engine, work(generate("r")), waiting[-1])
    settled = waiting[100:]
    assert 1 <= sum(settled) / len(settled) <= 3  # a freed slot is taken at once, and hardly anything waits there
    assert engine.requests >= running - 1

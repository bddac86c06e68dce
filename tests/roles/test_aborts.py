"""Many requests and many aborts at once: through real sockets, and until nothing of them is left anywhere."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import msgspec
import pytest

from flashflow.clock import LoopClock
from flashflow.config.sections import NetworkSection, RolloutSection, TorchEngineSection
from flashflow.messages import Abort, Ack, GenerateReply
from flashflow.roles.engine import EngineRole
from flashflow.roles.proxy import ProxyRole
from flashflow.transport.addresses import Addresses
from flashflow.transport.channel import Peer
from flashflow.transport.in_process import InProcessNetwork
from flashflow.transport.zeromq import ZmqTransport
from tests.roles.rollout_ring import lengths, play
from tests.roles.test_engine import CountingEngine, running
from tests.roles.test_proxy import generate

NETWORK = NetworkSection(startup_deadline_s=60, call_deadline_s=60, shutdown_deadline_s=10)
ENV, PROXY = Peer("env", 0, 1), Peer("proxy", 0, 1)
NUM_REQUESTS = 1024
NUM_ABORTS = 10_000


def engine_role(name, engine, slots):
    section = TorchEngineSection(slots=slots, stream_every_s=0.005)
    return EngineRole(name=name, engine=engine, section=section, network=NETWORK, clock=LoopClock(), executor=None)


class Rig:
    """An env's client towards a proxy with two engines."""

    def __init__(self, client, proxy, roles, engines):
        self.client, self.proxy, self.roles, self.engines = client, proxy, roles, engines

    async def ask(self, request):
        """Token ids and the finish reason."""
        tokens, last = [], None
        async for last in self.client.stream(request, GenerateReply, idle_deadline_s=60):
            tokens += last.token_ids.tolist()
        return tokens, last.finish_reason

    def assert_empty(self):
        proxy = self.proxy
        kept = [proxy._queue, proxy._queue._units, proxy._queue._blocks, proxy._running, proxy._aborted]
        kept += [role._answers for role in self.roles] + [engine._running for engine in self.engines]
        assert [len(each) for each in kept] == [0] * len(kept)
        assert [(end.requests, end.outstanding_tokens) for end in proxy._engines] == [(0, 0)] * 2


@asynccontextmanager
async def rig(transport_of, slots):
    """transport_of: the transport of a peer."""
    engines = [CountingEngine(), CountingEngine()]
    roles = [engine_role(f"engine-{index}", engine, slots) for index, engine in enumerate(engines)]
    async with AsyncExitStack() as stack:

        async def transport(peer):
            made = transport_of(peer)
            stack.push_async_callback(made.close)
            return made

        for index, role in enumerate(roles):
            await (await transport(Peer("engine", index, 1))).listen(role.handle, role.peer_lost)
            await stack.enter_async_context(running(role))
        end = await transport(PROXY)
        names = [f"engine-{index}" for index in range(2)]
        proxy = ProxyRole(
            engines={name: end.client(name) for name in names},
            rollout=RolloutSection(),
            network=NETWORK,
            clock=LoopClock(),
        )
        await end.listen(proxy.handle, proxy.peer_lost)
        env = await transport(ENV)
        await proxy.start()
        yield Rig(env.client("proxy-0"), proxy, roles, engines)
        await proxy.close()


async def until(holds):
    for _ in range(100_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to hold")


class Sockets:
    """Transports of one run that know each other's addresses as soon as they listen."""

    def __init__(self):
        self.addresses = Addresses()

    def __call__(self, peer):
        outer, transport = self, ZmqTransport(peer, "run", self.addresses, NETWORK, None)
        listen = transport.listen

        class Listening:
            counters = transport.counters
            client = staticmethod(transport.client)
            close = staticmethod(transport.close)

            @staticmethod
            async def listen(handler, on_peer_lost):
                await listen(handler, on_peer_lost)
                outer.addresses.update({f"{peer.role}-{peer.index}": transport.address})

        return Listening()


def test_a_thousand_concurrent_requests_pass_one_proxy_without_an_error():
    async def scenario():
        async with rig(Sockets(), slots=64) as it:
            asked = [it.ask(generate(f"r{n}", new=1 + n % 16)) for n in range(NUM_REQUESTS)]
            answers = await asyncio.gather(*asked)
            assert answers == [(list(range(1 + n % 16)), "length") for n in range(NUM_REQUESTS)]
            it.assert_empty()
            assert it.proxy._router.num_sessions == NUM_REQUESTS

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_ten_thousand_aborts_leave_every_map_of_proxy_and_engines_empty():
    """Queued and running, by message, by cancelling the call, and while the request ends by itself."""

    async def scenario():
        random = Random(7)
        network = InProcessNetwork(NETWORK, through_codec=False)
        async with rig(network.transport, slots=64) as it:
            for cycle in range(NUM_ABORTS // 500):
                requests = [generate(f"c{cycle}r{n}", new=random.choice([3, 1_000_000])) for n in range(500)]
                for n in range(0, 40, 2):  # some of them blocks of two
                    block = {"session": f"c{cycle}b{n}", "block_size": 2}
                    requests[n : n + 2] = [msgspec.structs.replace(r, **block) for r in requests[n : n + 2]]
                asked = [asyncio.create_task(it.ask(request)) for request in requests]
                for _ in range(random.randrange(12)):
                    await asyncio.sleep(0)
                names = [request.request for request in requests]
                cancelled = set(random.sample(range(500), 250))
                for index in cancelled:
                    asked[index].cancel()
                await it.client.call(Abort(requests=[*names, "unknown"]), Ack, deadline_s=60)
                await asyncio.wait(asked, timeout=0.05)
                while late := [name for name, task in zip(names, asked, strict=True) if not task.done()]:
                    await it.client.call(Abort(requests=late), Ack, deadline_s=60)
                    await asyncio.wait(asked, timeout=0.05)
                reasons = {task.result()[1] for task in asked if not task.cancelled()}
                assert reasons <= {"aborted", "length"}
            # Handlers of cancelled calls end a few turns of the loop later.
            await until(lambda: not it.proxy._running and not any(role._answers for role in it.roles))
            it.assert_empty()

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.slow
def test_ten_thousand_revoked_leases_leave_every_map_of_the_ring_empty(tmp_path):
    options = {"groups": 32, "group_size": 8, "redundant_members": 8, "num_engines": 4, "slots": 64}
    played = play(tmp_path, steps=40, num_envs=4, concurrency=300, length_of=lengths(3), **options)
    assert played.stats["surplus"] >= NUM_ABORTS
    assert played.leftovers == {}


def test_an_aborted_request_has_left_its_slot_when_the_abort_is_acknowledged():
    async def scenario():
        network = InProcessNetwork(NETWORK, through_codec=False)
        async with rig(network.transport, slots=8) as it:
            asked = [asyncio.create_task(it.ask(generate(f"r{n}", new=1_000_000))) for n in range(16)]
            await until(lambda: sum(engine.num_running for engine in it.engines) == 16)
            await it.client.call(Abort(requests=["r0"]), Ack, deadline_s=60)
            assert sum(engine.num_running for engine in it.engines) == 15
            assert (await asked[0])[1] == "aborted"
            for task in asked[1:]:
                task.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))

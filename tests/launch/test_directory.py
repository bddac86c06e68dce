"""What slots tell each other, over torchrun's kind of store, in one process."""

import asyncio
import functools
import threading
from datetime import timedelta

import pytest

from flashflow.errors import ConfigError, DeadlineError, PeerLost
from flashflow.launch.directory import GangAdvanced, LocalDirectory, Over, Placed, Signalled
from flashflow.launch.hosts import Host
from flashflow.launch.link import Place
from flashflow.launch.run_facts import RunFacts
from flashflow.launch.session import Hello, Roster, gather, meet
from flashflow.launch.store_directory import KEPT_NEWS, StoreDirectory


def in_loop(test):
    @functools.wraps(test)
    def run(*arguments, **fixtures):
        asyncio.run(test(*arguments, **fixtures))

    return run


PLACE = Placed(name="proxy-0", place=Place("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", 1))


@pytest.fixture
def connect():
    """A function that makes one more client of a store."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10))


def directories(connect, count, deadline_s=20.0):
    names = [f"host h{slot}" for slot in range(count)]
    return [
        StoreDirectory(connect(), slot=slot, names=names, heartbeat_s=0.05, deadline_s=deadline_s)
        for slot in range(count)
    ]


async def take(directory, count):
    found = []
    async for news in directory.news():
        found.append(news)
        if len(found) == count:
            return found


@in_loop
async def test_news_reach_every_slot_in_order(connect):
    slots = directories(connect, 3)
    sent = [PLACE, Signalled(number=15), Signalled(number=2)]
    for news in sent:
        slots[1].post(news)
    for slot in slots:
        assert await take(slot, 3) == sent
    for slot in slots:
        assert await slot.close() is None


@in_loop
async def test_one_of_many_slots_advances_the_gang_and_all_hear_it(connect):
    slots = directories(connect, 3)
    won = await asyncio.gather(*(slot.advance_gang(1, f"slot {n}") for n, slot in enumerate(slots)))
    assert sorted(won) == [False, False, True]
    winner = won.index(True)
    for slot in slots:
        assert await take(slot, 1) == [GangAdvanced(generation=2, reason=f"slot {winner}")]
    assert not await slots[0].advance_gang(1, "too late")
    assert await slots[0].advance_gang(2, "again")
    assert await take(slots[2], 1) == [GangAdvanced(generation=3, reason="again")]
    for slot in slots:
        await slot.close()


@in_loop
async def test_the_first_end_is_everybodys(connect):
    slots = directories(connect, 3)
    ends = [Over(code=1, failure=f"slot {n}", permanent=True) for n in range(3)]
    for slot, end in zip(slots, ends, strict=True):
        slot.end(end)
    heard = [(await take(slot, 1))[0] for slot in slots]
    assert heard == [heard[0]] * 3
    assert heard[0] in ends
    assert [await slot.close() for slot in slots] == heard


@in_loop
async def test_a_silent_slot_is_named(connect):
    slots = directories(connect, 3, deadline_s=1.0)
    await slots[2].close()
    with pytest.raises(PeerLost, match=r"host h2 gave no sign of life for network.peer_deadline_s = 1 s"):
        await slots[0].watch()
    assert not slots[0].cut_off
    await slots[0].close()
    with pytest.raises(PeerLost, match="host h0 gave no sign of life"):
        await slots[1].watch()
    await slots[1].close()


@in_loop
async def test_a_slot_without_its_store_knows_that_it_is_cut_off():
    class Hanging:
        """A store behind a cut link."""

        released = threading.Event()

        def set(self, key, value):
            self.released.wait()

    (slot,) = directories(Hanging, 1, deadline_s=0.3)
    with pytest.raises(PeerLost, match="host h0 is cut off, or the host of rank 0 is gone"):
        await slot.watch()
    assert slot.cut_off
    Hanging.released.set()


@in_loop
async def test_old_news_are_deleted(connect):
    store = connect()
    (slot,) = directories(lambda: store, 1)
    for _ in range(KEPT_NEWS + 3):
        slot.post(PLACE)
    await slot.close()
    assert [store.check([f"news/0/{number}"]) for number in (3, 4)] == [False, True]


@in_loop
async def test_the_only_slot_of_a_run_decides_alone():
    directory = LocalDirectory()
    directory.post(PLACE)
    assert await directory.advance_gang(1, "why")
    assert not await directory.advance_gang(1, "late")
    directory.end(Over(code=0))
    directory.end(Over(code=1))
    assert await take(directory, 3) == [PLACE, GangAdvanced(generation=2, reason="why"), Over(code=0)]
    assert await directory.close() == Over(code=0)


# ---- how slots meet


def hello(rank, name="h", address="10.0.0.1", machine="m", config="c", **host):
    return Hello(rank=rank, host=Host(name, address, **host), machine=machine, config=config)


def roster_of(hellos):
    facts = RunFacts(run_id="r", resume=False, carrier="file", key=None)
    return Roster(nonces=[found.nonce for found in hellos], facts=facts)


@in_loop
async def test_slots_meet_once_a_round_whatever_the_round_before_left(connect):
    async def a_round():
        hellos = [hello(rank) for rank in range(3)]
        return await asyncio.gather(
            *(asyncio.to_thread(meet, connect(), found, 3, roster_of, deadline_s=20) for found in reversed(hellos))
        )

    first, second = await a_round(), await a_round()
    assert [{number for number, _ in found} for found in (first, second)] == [{1}, {2}]
    assert len({tuple(roster.nonces) for _, roster in first + second}) == 2


@in_loop
async def test_a_refusal_reaches_every_slot(connect):
    def refuse(hellos):
        raise ConfigError(["placement.engine: too many"])

    found = await asyncio.gather(
        *(asyncio.to_thread(meet, connect(), hello(rank), 2, refuse, deadline_s=20) for rank in range(2))
    )
    assert [roster.refusal for _, roster in found] == [["placement.engine: too many"]] * 2


@in_loop
async def test_a_slot_that_does_not_come_is_named(connect):
    with pytest.raises(DeadlineError, match="slot 1 of 2 has not come within"):
        await asyncio.to_thread(meet, connect(), hello(0), 2, roster_of, deadline_s=0.3)


def test_hosts_are_in_natural_order_whatever_the_ranks():
    hosts, seats = gather([hello(0, "gpu-10"), hello(1, "gpu-2"), hello(2, "gpu-10"), hello(3, "cpu-1")])
    assert [(host.name, host.slots) for host in hosts] == [("cpu-1", 1), ("gpu-2", 1), ("gpu-10", 2)]
    assert seats == [(2, 0), (1, 0), (2, 1), (0, 0)]


def test_slots_of_one_host_pool_their_devices_and_pin_nothing_unless_their_cores_are_the_same():
    (host,), _ = gather([hello(0, cores=(0, 1), devices=("0",)), hello(1, cores=(2, 3), devices=("1", "0"))])
    assert (host.cores, host.devices) == ((), ("0", "1"))
    (host,), _ = gather([hello(0, cores=(0, 1)), hello(1, cores=(0, 1))])
    assert host.cores == (0, 1)


def test_slots_that_cannot_be_one_run_are_refused():
    with pytest.raises(ConfigError, match="b was started with another config than a"):
        gather([hello(0, "a"), hello(1, "b", config="other")])
    with pytest.raises(ConfigError, match=r"network.interface: b would bind to 127.0.0.1"):
        gather([hello(0, "a"), hello(1, "b", address="127.0.0.1", machine="other")])
    gather([hello(0, "a", address="127.0.0.1"), hello(1, "b", address="127.0.0.1")])  # two nodes of one machine

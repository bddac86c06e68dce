"""The directory of addresses only moves forward, and tells those who asked."""

import asyncio

import pytest

from flashflow.errors import DeadlineError
from flashflow.simulate.clock import run_virtual
from flashflow.transport.addresses import Address, Addresses


def at(port: int, incarnation: int) -> Address:
    return Address(data=f"tcp://h:{port}", control=f"tcp://h:{port + 1}", incarnation=incarnation)


def test_listeners_hear_each_change_once_and_nothing_of_an_older_incarnation() -> None:
    addresses, heard = Addresses(), []
    unsubscribe = addresses.subscribe("engine-0", heard.append)
    addresses.update({"engine-0": at(1, 0), "engine-1": at(9, 0)})
    addresses.update({"engine-0": at(1, 0)})
    addresses.update({"engine-0": at(3, 1)})
    addresses.update({"engine-0": at(1, 0)})
    assert heard == [at(1, 0), at(3, 1)]
    assert addresses.get("engine-0") == at(3, 1)
    unsubscribe()
    addresses.update({"engine-0": at(5, 2)})
    assert len(heard) == 2


def test_waiting_ends_with_the_news_or_with_the_deadline() -> None:
    async def scenario() -> None:
        addresses = Addresses()
        waiting = asyncio.create_task(addresses.wait_for("buffer-0", deadline_s=10.0))
        await asyncio.sleep(9.0)
        addresses.update({"buffer-0": at(1, 0)})
        assert await waiting == at(1, 0)
        assert await addresses.wait_for("buffer-0", deadline_s=10.0) == at(1, 0)
        with pytest.raises(DeadlineError, match=r"address of proxy-0 .*startup_deadline_s = 10.0 s"):
            await addresses.wait_for("proxy-0", deadline_s=10.0)
        assert asyncio.get_running_loop().time() == 19.0

    run_virtual(scenario())

"""Credits are handed out in order, and none is lost or made by a cancellation."""

import asyncio

import pytest

from flashflow.errors import PeerLost
from flashflow.simulate.clock import run_virtual
from flashflow.transport.outstanding import Credits


def test_waiters_get_credits_in_their_order_and_no_more_than_the_limit() -> None:
    async def scenario() -> None:
        credits, order = Credits(), []

        async def worker(number: int) -> None:
            await credits.acquire()
            order.append(number)

        tasks = [asyncio.create_task(worker(number)) for number in range(5)]
        await asyncio.sleep(1)
        assert order == []
        credits.set_limit(2)
        await asyncio.sleep(1)
        assert order == [0, 1]
        credits.set_limit(0)  # the connection is gone: what is released now is not handed out
        credits.release()
        await asyncio.sleep(1)
        assert order == [0, 1]
        credits.set_limit(3)
        await asyncio.sleep(1)
        assert order == [0, 1, 2, 3]
        credits.release()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]

    run_virtual(scenario())


def test_a_credit_that_comes_together_with_a_cancellation_goes_to_the_next() -> None:
    async def scenario() -> None:
        credits = Credits()
        first, second = asyncio.create_task(credits.acquire()), asyncio.create_task(credits.acquire())
        await asyncio.sleep(1)
        credits.set_limit(1)
        first.cancel()
        await second
        assert first.cancelled()

    run_virtual(scenario())


def test_a_waiter_that_is_cancelled_takes_nothing() -> None:
    async def scenario() -> None:
        credits = Credits()
        first, second = asyncio.create_task(credits.acquire()), asyncio.create_task(credits.acquire())
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.sleep(1)
        credits.set_limit(1)
        await second

    run_virtual(scenario())


def test_closing_wakes_those_who_wait() -> None:
    async def scenario() -> None:
        credits = Credits()
        waiting = asyncio.create_task(credits.acquire())
        await asyncio.sleep(1)
        credits.close("closed")
        with pytest.raises(PeerLost, match="closed"):
            await waiting
        with pytest.raises(PeerLost):
            await credits.acquire()

    run_virtual(scenario())

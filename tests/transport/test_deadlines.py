"""Deadlines come when they are due, each once, and not for what was taken out before."""

import asyncio

from flashflow.simulate.clock import run_virtual
from flashflow.transport.deadlines import Deadlines


def test_each_expires_at_its_own_time_whatever_the_order_of_the_seconds():
    async def scenario():
        loop, expired = asyncio.get_running_loop(), []
        deadlines = Deadlines(lambda item, seconds: expired.append((item, seconds, loop.time() - began)))
        began = loop.time()
        deadlines.add("slow", 10.0)
        deadlines.add("quick", 1.0)
        await asyncio.sleep(0.5)
        deadlines.add("later", 1.0)
        await asyncio.sleep(20)
        assert expired == [("quick", 1.0, 1.0), ("later", 1.0, 1.5), ("slow", 10.0, 10.0)]
        assert len(deadlines) == 0

    run_virtual(scenario())


def test_what_is_taken_out_expires_never_and_leaves_nothing_behind():
    async def scenario():
        expired = []
        deadlines = Deadlines(lambda item, seconds: expired.append(item))
        for number in range(1000):
            deadlines.add(number, 5.0)
            deadlines.remove(number, 5.0)
            deadlines.remove(number, 5.0)
        assert len(deadlines) == 0
        await asyncio.sleep(4)
        deadlines.add("next", 5.0)
        await asyncio.sleep(4)
        assert expired == []
        await asyncio.sleep(2)
        assert expired == ["next"]

    run_virtual(scenario())

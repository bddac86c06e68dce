"""Virtual time passes without waiting, in the right order, and a deadlock is named instead of waited for."""

import asyncio
import math

import pytest

from flashflow.clock import LoopClock
from flashflow.errors import ContractError
from flashflow.simulate.clock import run_virtual


def test_a_year_of_sleep_passes_at_once_and_exactly() -> None:
    async def scenario() -> float:
        clock = LoopClock()
        await clock.sleep(365 * 24 * 3600.0)
        return clock.now()

    assert run_virtual(scenario()) == pytest.approx(365 * 24 * 3600.0)


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def scenario() -> list[tuple[float, int]]:
        fired = []

        async def sleeper(number: int, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((asyncio.get_running_loop().time(), number))

        await asyncio.gather(*(sleeper(i, s) for i, s in enumerate((3.0, 1.0, 2.0, 1.5))))
        return fired

    assert run_virtual(scenario()) == [(1.0, 1), (1.5, 3), (2.0, 2), (3.0, 0)]


def test_a_timeout_ends_by_virtual_time() -> None:
    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 50.0


def test_time_advances_even_where_a_step_is_lost_in_rounding() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1e9)
        for _ in range(100):
            await asyncio.sleep(1e-12)  # the spacing of floats at 1e9 is 1.2e-7
        return loop.time()

    assert 1e9 <= run_virtual(scenario()) <= 1e9 + 100 * math.ulp(1e9)


def test_a_deadlock_names_the_tasks_that_wait_and_where() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        await asyncio.sleep(7.0)
        await asyncio.create_task(waits_for_ever(), name="env 3")

    with pytest.raises(ContractError, match=r"deadlock at 7 s .* 2 tasks wait: .*env 3 at .*waits_for_ever:\d+"):
        run_virtual(scenario())


def test_the_exception_of_the_coroutine_comes_out() -> None:
    async def scenario() -> None:
        await asyncio.sleep(1.0)
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        run_virtual(scenario())


def test_two_runs_take_the_same_course() -> None:
    async def scenario() -> list[int]:
        order: list[int] = []

        async def worker(number: int) -> None:
            for step in range(5):
                await asyncio.sleep((number * 7 + step * 3) % 5)
                order.append(number)

        await asyncio.gather(*(worker(i) for i in range(20)))
        return order

    assert run_virtual(scenario()) == run_virtual(scenario())

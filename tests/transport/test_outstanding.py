"""A call that waits for its answer."""

import asyncio

import pytest

from flashflow.errors import DeadlineError
from flashflow.messages import Ack
from flashflow.transport.outstanding import Pending


def test_an_answer_that_came_before_its_deadline_is_not_lost_to_it():
    async def main() -> None:
        pending = Pending("Ack", "data", [], streamed=False)
        pending.put(Ack(), final=True)
        pending.expire(DeadlineError("too late"))
        assert await pending.take() == (Ack(), True)

    asyncio.run(main())


def test_what_waits_for_it_is_told_of_its_deadline():
    async def main() -> None:
        pending = Pending("Ack", "data", [], streamed=False)
        taker = asyncio.create_task(pending.take())
        await asyncio.sleep(0)
        pending.expire(DeadlineError("too late"))
        with pytest.raises(DeadlineError):
            await taker

    asyncio.run(main())

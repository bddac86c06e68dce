"""What the buffer needs of a dataset."""

from typing import Protocol

from flashflow.records import Task


class TaskStream(Protocol):
    """Tasks by cursor: position in the endless stream, pass * len + place in that pass's shuffle.

    Pure: the same cursor gives the same task.
    """

    def task(self, cursor: int) -> Task | None:
        """None when the data has ended (epochs used up)."""
        ...

    def eval_tasks(self, count: int) -> list[Task]:
        """The first `count` held-out problems, disjoint from every training task.

        Raises ConfigError when there are fewer.
        """
        ...

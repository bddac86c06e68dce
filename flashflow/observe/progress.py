"""Shows a person how a run goes: a live panel in a terminal, one line per step anywhere else."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

from flashflow.observe.panel import Snapshot, line, panel

REFRESHES_PER_S = 2


class ProgressDisplay:
    """A context manager; leaving it restores the terminal whatever happened.

    Metrics come as MetricsWriter gets them; `ledger_buffer_fill`, where there is one, is shown as the buffer's fill.
    """

    def __init__(self, console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console if console is not None else Console(highlight=False)
        self._now = now
        self._snapshot = Snapshot(total_steps=0)
        self._live: Live | None = None
        self._step_began = now()

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """`first_step`: the steps that a resumed run has behind it."""
        self._snapshot = Snapshot(total_steps=total_steps, first_step=first_step)
        self._step_began = self._now()
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._draw, refresh_per_second=REFRESHES_PER_S, transient=False
            )
            self._live.start()

    def update(self, step_record: Mapping[str, Any]) -> None:
        """A step was trained."""
        self._snapshot = self._snapshot.after(step_record)
        self._step_began = self._now()
        if self._live is not None:
            self._live.refresh()
        else:
            self._print(line(self._snapshot, self._console.width))

    def note(self, text: str) -> None:
        """A warning, or news that is no step; stays above the panel."""
        self._print(text)

    def evaluation(self, step: int, accuracy: float) -> None:
        """Of the weights after `step` steps."""
        self._snapshot = replace(self._snapshot, evaluation=(step, accuracy))
        self._print(f"evaluation at step {step}: accuracy {accuracy:.3f}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Ends the panel and prints what came out, a line each."""
        self.close()
        width = max(map(len, summary), default=0)
        for name, value in summary.items():
            self._print(f"{name:<{width}}  {f'{value:.4g}' if isinstance(value, float) else value}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draw(self) -> RenderableType:
        ascii_only = self._console.options.ascii_only
        return panel(self._snapshot, step_s=self._now() - self._step_began, ascii_only=ascii_only)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()  # a pipe or a file must show a step when it is done, not 8 kB later

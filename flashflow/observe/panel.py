"""What a person sees of a run at one moment: a frozen snapshot, drawn as a panel or as one line of text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

HISTORY = 32
"""Steps of the curve of rewards, and of the mean from which the time left follows."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Of a run after its newest step."""

    total_steps: int
    first_step: int = 0
    """Step from which this start of the run goes on."""
    record: Mapping[str, Any] | None = None
    """Metrics of the newest step; None before the first."""
    rewards: tuple[float, ...] = ()
    """Mean rewards of the last HISTORY steps, oldest first."""
    step_times_s: tuple[float, ...] = ()
    evaluation: tuple[int, float] | None = None
    """(version, accuracy) of the newest evaluation."""

    @property
    def step(self) -> int:
        return int(self.record["step"]) if self.record is not None else self.first_step

    @property
    def seconds_left(self) -> float | None:
        """At the mean pace of the last HISTORY steps; None before the first."""
        if not self.step_times_s:
            return None
        return (self.total_steps - self.step) * sum(self.step_times_s) / len(self.step_times_s)

    def after(self, record: Mapping[str, Any]) -> "Snapshot":
        reward = record.get("reward_mean")
        rewards = self.rewards if reward is None else (*self.rewards, float(reward))
        times = (*self.step_times_s, float(record["time_step_s"]))
        return replace(self, record=record, rewards=rewards[-HISTORY:], step_times_s=times[-HISTORY:])


def sparkline(values: tuple[float, ...]) -> str:
    """One bar per value between the least and the greatest; all alike: bars of middle height."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high == low:
        return BARS[len(BARS) // 2] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def clock(seconds: float | None) -> str:
    """h:mm:ss or m:ss."""
    if seconds is None:
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def line(snapshot: Snapshot, width: int) -> str:
    """The newest step on one line of at most `width` columns: what fits, the most important first."""
    digits = len(str(snapshot.total_steps))
    text = f"step {snapshot.step:>{digits}}/{snapshot.total_steps}"
    for name, value in _facts(snapshot):
        longer = f"{text}  {name} {value}"
        if len(longer) > width:
            break
        text = longer
    return text[:width]


def panel(snapshot: Snapshot, *, step_s: float, ascii_only: bool) -> RenderableType:
    """`step_s`: seconds since the newest step ended, which shows that the run is alive."""
    cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in _facts(snapshot) if name != "left"]
    facts = Columns(cells, padding=(0, 3))
    parts: list[RenderableType] = [_bar(snapshot, step_s), facts]
    if snapshot.rewards and not ascii_only:
        parts.append(Text.assemble(("reward curve ", "dim"), (sparkline(snapshot.rewards), "green")))
    return Panel(Group(*parts), title="flashflow", title_align="left", border_style="dim")


def _bar(snapshot: Snapshot, step_s: float) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=snapshot.total_steps, completed=snapshot.step)
    now = f"step {snapshot.step}/{snapshot.total_steps}"
    row.add_row(now, bar, f"{clock(snapshot.seconds_left)} left, this step {clock(step_s)}")
    return row


def _facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    """(name, value), the most important first; what is not known is left out."""
    record = snapshot.record
    if record is None:
        return [("waiting for", "the first batch")]
    seconds = max(float(record["time_step_s"]), 1e-9)
    facts = [
        ("reward", _number(record.get("reward_mean"), 3)),
        ("staleness", f"{_number(record.get('staleness_mean'), 2)} max {_number(record.get('staleness_max'), 0)}"),
        ("tokens/s", f"{record.get('tokens_generated', 0) / seconds:,.0f}"),
        ("left", clock(snapshot.seconds_left)),
    ]
    if snapshot.evaluation is not None:
        version, accuracy = snapshot.evaluation
        facts.append(("eval", f"{accuracy:.3f} at {version}"))
    facts += [
        ("loss", _number(record.get("loss"), 4)),
        ("step", f"{seconds:.1f} s"),
        ("waiting", f"{100 * float(record.get('time_wait_s', 0.0)) / seconds:.0f} %"),
    ]
    if "ledger_buffer_fill" in record:
        facts.append(("buffer", f"{100 * float(record['ledger_buffer_fill']):.0f} % of a batch ready"))
    return facts


def _number(value: Any, digits: int) -> str:
    return "-" if value is None else f"{float(value):.{digits}f}"

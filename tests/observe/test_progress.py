import io

import pytest
from rich.console import Console

from flashflow.observe.panel import HISTORY, Snapshot, clock, line, sparkline
from flashflow.observe.progress import ProgressDisplay


def record(step, **changes):
    return {
        "step": step,
        "reward_mean": 0.25,
        "staleness_mean": 0.5,
        "staleness_max": 1.0,
        "tokens_generated": 3000,
        "time_step_s": 2.0,
        "time_wait_s": 0.5,
        "loss": -0.0123,
        **changes,
    }


def display(width, *, terminal):
    console = Console(file=io.StringIO(), width=width, height=30, force_terminal=terminal, color_system=None)
    return ProgressDisplay(console, now=lambda: 7.0), console


def test_outside_a_terminal_a_step_is_one_line():
    shown, console = display(100, terminal=False)
    with shown:
        shown.start(20)
        shown.update(record(1))
        shown.evaluation(1, 0.5)
        shown.note("engine-1 was restarted [1 of 3]")
        shown.update(record(2, reward_mean=None))
        shown.finish({"steps": 2, "reward_mean": 0.25, "run_folder": "runs/a"})
    # 3000 tokens in 2 s; 19 steps of 2 s left, then 18
    assert console.file.getvalue().splitlines() == [
        "step  1/20  reward 0.250  staleness 0.50 max 1  tokens/s 1,500  left 0:38  loss -0.0123  step 2.0 s",
        "evaluation at step 1: accuracy 0.500",
        "engine-1 was restarted [1 of 3]",
        "step  2/20  reward -  staleness 0.50 max 1  tokens/s 1,500  left 0:36  eval 0.500 at 1  loss -0.0123",
        "steps        2",
        "reward_mean  0.25",
        "run_folder   runs/a",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_line_never_exceeds_the_width(width):
    snapshot = Snapshot(total_steps=1000).after(record(999))
    assert len(line(snapshot, width)) <= width


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_shows_the_panel_within_its_width(width):
    shown, console = display(width, terminal=True)
    with shown:
        shown.start(20)
        shown.update(record(5, reward_mean=0.0))
        shown.evaluation(5, 0.75)
        shown.update(record(6, reward_mean=1.0, ledger_buffer_fill=0.25))
        shown.note("a warning")
    text = console.file.getvalue()
    assert "step 6/20" in text
    assert "▁█" in text
    assert "buffer 25 % of a batch ready" in text
    assert "a warning" in text
    assert max(len(row) for row in console.render_lines(shown._draw(), pad=False)) <= width


def test_leaving_restores_the_terminal_when_the_run_fails():
    shown, console = display(80, terminal=True)
    shown.start(20)
    with pytest.raises(RuntimeError), shown:
        raise RuntimeError("a role failed")
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_a_resumed_run_counts_from_where_it_goes_on():
    snapshot = Snapshot(total_steps=20, first_step=10)
    assert snapshot.step == 10
    assert snapshot.seconds_left is None
    assert snapshot.after(record(11, time_step_s=3.0)).seconds_left == 27.0  # 9 steps of 3 s


def test_only_the_newest_steps_are_kept():
    snapshot = Snapshot(total_steps=100)
    for step in range(1, HISTORY + 6):
        snapshot = snapshot.after(record(step, reward_mean=float(step)))
    assert snapshot.rewards == tuple(float(step) for step in range(6, HISTORY + 6))


@pytest.mark.parametrize(
    ("values", "bars"), [((), ""), ((0.5, 0.5), "▅▅"), ((0.0, 1.0, 0.5), "▁█▅"), ((-1.0, 0.0), "▁█")]
)
def test_a_sparkline_spans_least_to_greatest(values, bars):
    assert sparkline(values) == bars


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-:--"), (0.4, "0:00"), (61, "1:01"), (3600 * 26 + 61, "26:01:01")]
)
def test_a_clock_reads_minutes_and_hours(seconds, text):
    assert clock(seconds) == text

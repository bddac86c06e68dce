"""What `flashflow eval` shows: a bar on standard error while it runs, a table on standard output at the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from flashflow.evaluation.summary import Summary
from flashflow.launch.evaluate import Evaluated, Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """In a terminal; anywhere else it shows nothing."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("answers", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(line, completed=done, total=total)

        yield progress


def print_evaluation(result: Evaluated, console: Console | None = None) -> None:
    screen = console if console is not None else Console()
    screen.print(_table(result.summary))
    screen.print(f"transcripts: {result.transcripts}", soft_wrap=True, highlight=False)


def _table(summary: Summary) -> Table:
    title = f"{summary.num_problems} held-out problems, {summary.samples} sample(s) each"
    table = Table("measure", "value", "standard error", title=title, title_justify="left")
    for estimate in summary.estimates:
        error = f"{estimate.error:.4f}" if estimate.error is not None else "-"
        table.add_row(estimate.name, f"{estimate.value:.4f}", error)
    table.add_row("mean response tokens", f"{summary.mean_response_tokens:.1f}", "")
    table.add_row("truncated share", f"{summary.truncated_share:.4f}", "")
    table.add_row("samples without a reward", str(summary.num_unscored), "")
    return table

"""A simulation for a person."""

from rich.console import Console
from rich.table import Table

from flashflow.simulate.figures import Figures


def print_figures(found: Figures, console: Console) -> None:
    table = Table("figure", "value", "", title="simulated", title_justify="left")
    for row in rows(found):
        table.add_row(*row)
    console.print(table)


def rows(found: Figures) -> list[tuple[str, str, str]]:
    """(figure, value, what it is)."""
    states = ", ".join(f"{count} {state}" for state, count in found.states.items() if count)
    return [
        ("steps", f"{found.steps}", f"in {found.seconds:,.1f} s, after {found.warmup_steps} to warm up"),
        ("step time", f"{found.step_s_mean:,.2f} s", f"mean; median {found.step_s_median:,.2f} s"),
        ("trainer waits", f"{found.wait_s_mean:,.2f} s", "of each step, for its batch: the trainer's bubble"),
        ("trainer trains", f"{found.train_s_mean:,.2f} s", "of each step"),
        ("samples", f"{found.samples_per_s:,.3f} /s", "trained"),
        ("tokens trained", f"{found.tokens_trained_per_s:,.0f} /s", f"{found.length_trained_mean:,.0f} a sample"),
        ("tokens generated", f"{found.tokens_generated_per_s:,.0f} /s", ""),
        ("trainer busy", f"{found.trainer_busy:.1%}", "of the time"),
        ("slots busy", f"{found.slots_busy:.1%}", "of all slots; the rest are the engines' bubbles"),
        ("engines busy", f"{found.engines_busy:.1%}", "of the time with any request"),
        ("in environments", f"{found.attempts_in_environments:,.1f}", "attempts at a time, mean"),
        ("wasted", f"{found.wasted:.1%}", "of the tokens generated"),
        ("staleness", f"{found.staleness_mean:.2f}", f"mean, in versions; never more than {found.staleness_max}"),
        ("retries", f"{found.retries}", "of attempts whose environment broke"),
        ("samples at the end", states, ""),
    ]

"""A simulation for a person."""

from rich.console import Console
from rich.table import Table

from flashflow.simulate.figures import Figures
from flashflow.simulate.planner import PAYS, Candidate, Plan


def print_figures(found: Figures, console: Console) -> None:
    table = Table("figure", "value", "", title="simulated", title_justify="left")
    for row in rows(found):
        table.add_row(*row)
    console.print(table)


def print_plan(plan: Plan, console: Console) -> None:
    names = ("setting", "train", "engines", "alpha", "concurrency", "samples/s", "step s")
    table = Table(*names, title="simulated", title_justify="left")
    chosen = {"today": plan.today, "best synchronous": plan.best_synchronous, "best": plan.best}
    for name, candidate in chosen.items():
        table.add_row(name, *_setting(candidate))
    console.print(table)
    console.print(f"the best is {plan.speedup:.2f} times as fast as today's")
    gain = plan.best.samples_per_s / plan.best_synchronous.samples_per_s
    if plan.asynchrony_pays:
        console.print(f"asynchrony pays: {gain:.2f} times the best synchronous setting")
    else:
        console.print(
            f"asynchrony will not pay: {gain:.2f} times the best synchronous setting, less than {PAYS:g}; "
            "keep rollout.alpha 0"
        )


def _setting(candidate: Candidate) -> tuple[str, ...]:
    return (
        f"{candidate.train_devices}",
        f"{candidate.engines}",
        f"{candidate.alpha:g}",
        f"{candidate.concurrency}",
        f"{candidate.samples_per_s:,.2f}",
        f"{candidate.step_s:,.2f}",
    )


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

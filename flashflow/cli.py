"""The command line. What costs time is imported inside the command that needs it, so that mistakes show at once.

Exit codes: 0 done, 1 a run failed, 2 the config or the command is wrong, 130 interrupted, 143 terminated.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flashflow.errors import ConfigError, FlashflowError

app = typer.Typer(
    help="Asynchronous reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Laid over the file.", show_default=False)
]

Roles = Annotated[
    str | None, typer.Option("--roles", metavar="ROLE=N,...", help="Processes, e.g. trainer=2,engine=2,env=4.")
]

CHECKPOINT = "newest, a step, a name like step-000020, or a folder"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    roles: Roles = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that the run folder holds.")] = False,
) -> None:
    """Train on this machine: every role a process of its own, all stopped together."""
    from flashflow.config import load_config

    if resume and overwrite:
        raise typer.BadParameter("--resume keeps the run and --overwrite replaces it; give one")
    from flashflow.launch.options import role_overrides

    loaded = load_config(config, [*(overrides or []), *role_overrides(roles)])
    from flashflow.launch.run import train as start

    raise typer.Exit(start(loaded, resume=resume, overwrite=overwrite))


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    roles: Roles = None,
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="N|NAME,...", help="Plan for other hosts than this one.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="M|M,...", help="CUDA devices of each host.")
    ] = None,
) -> None:
    """Validate a config and print its placement and what follows; loads no model and starts no process."""
    from flashflow.config import load_config
    from flashflow.launch.check import print_check
    from flashflow.launch.options import imagined_hosts, role_overrides

    print_check(load_config(config, [*(overrides or []), *role_overrides(roles)]), imagined_hosts(hosts, devices))


@app.command()
def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Virtual seconds, in place of run.steps.", show_default=False)
    ] = None,
) -> None:
    """Run the scheduling of a config with simulated parts on a virtual clock; figures, and trace.json for Perfetto."""
    from rich.console import Console

    from flashflow.config import load_config
    from flashflow.simulate.run import simulate as start
    from flashflow.simulate.run import write
    from flashflow.simulate.table import print_figures

    loaded = load_config(config, [*(overrides or []), *(["run.steps=1000000000"] if seconds is not None else [])])
    simulation = start(loaded, seconds=seconds)
    print_figures(simulation.figures, Console())
    typer.echo(f"trace: {write(simulation, loaded.run_folder)}")


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    trace: Annotated[Path, typer.Option("--trace", metavar="RUN_FOLDER", help="A run of this config.")],
    devices: Annotated[int, typer.Option("--devices", help="To be split.")],
) -> None:
    """Find the best split between trainer and engines, alpha and concurrency, on the simulator, from a run's trace."""
    from rich.console import Console

    from flashflow.config import load_config
    from flashflow.simulate.planner import calibrate
    from flashflow.simulate.planner import plan as search
    from flashflow.simulate.table import print_plan

    loaded = load_config(config, overrides or [])
    print_plan(search(loaded, calibrate(trace, loaded), devices), Console())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="CONFIG|RUN_FOLDER", help="Whose checkpoint.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="A new folder.", show_default=False)],
    checkpoint: Annotated[str, typer.Option("--checkpoint", help=f"{CHECKPOINT}.")] = "newest",
    dtype: Annotated[Dtype, typer.Option("--dtype", help="float32: as the trainer keeps them.")] = Dtype.float32,
    adapter: Annotated[bool, typer.Option("--adapter", help="Of LoRA: the adapters alone, for peft.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder: model, config, generation config, tokenizer; adapters merged."""
    from flashflow.launch.export import export as write
    from flashflow.launch.export import export_adapter
    from flashflow.launch.stored_run import open_run

    if adapter:
        if dtype is not Dtype.float32:
            raise typer.BadParameter("--adapter writes float32, as adapters are trained; leave --dtype out")
        folder = export_adapter(open_run(run), checkpoint, output, _note)
    else:
        folder = write(open_run(run), checkpoint, output, dtype.value, _note)
    typer.echo(f"{folder} -> {output}")


@app.command(name="eval")
def evaluate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG|RUN_FOLDER", help="What to ask.", show_default=False)],
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help=f"{CHECKPOINT}. Without: the model the run starts from.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Answers per problem; one is greedy.")] = 1,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Of several samples: the config's, unless given.")
    ] = None,
    k: Annotated[str | None, typer.Option("--k", metavar="1,4", help="For pass@k; 1 and --samples.")] = None,
    threshold: Annotated[float, typer.Option("--threshold", help="Reward that solves a problem.")] = 1.0,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Transcripts; in the run folder, unless given.")
    ] = None,
) -> None:
    """Answer the held-out problems (`evaluation.problems`) with one model, and print averages and pass@k."""
    from flashflow.launch.eval_report import print_evaluation, progress_bar
    from flashflow.launch.evaluate import EvalOptions
    from flashflow.launch.evaluate import evaluate as start
    from flashflow.launch.stored_run import open_run

    options = EvalOptions(checkpoint, samples, temperature, _numbers("--k", k), threshold, output)
    with progress_bar() as progress:
        result = start(open_run(config, overrides or []), options, _note, progress)
    print_evaluation(result)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="As the reference for people, docs/config.md.")] = False,
) -> None:
    """Print the JSON schema of config files, for editors."""
    import json

    from flashflow.config.reference import reference
    from flashflow.config.report import schema as config_schema

    typer.echo(reference().rstrip() if markdown else json.dumps(config_schema(), indent=2))


def main() -> None:
    """Entry point: every mistake of a config on a line of its own, every other failure as one message."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # reward modules beside the config are found here as they are in role processes
    try:
        app()
    except ConfigError as error:
        count = len(error.mistakes)
        _complain(f"{count} mistake{'s' if count > 1 else ''} in the config; nothing was started")
        for mistake in error.mistakes:
            typer.echo(f"  {mistake}", err=True)
        sys.exit(2)
    except FlashflowError as error:
        _complain(str(error))
        sys.exit(1)


def _numbers(option: str, text: str | None) -> list[int] | None:
    """`1,4` as numbers. Raises BadParameter."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{option} {text}: must be whole numbers joined by commas, e.g. 1,4")
    return [int(part) for part in parts]


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _complain(text: str) -> None:
    typer.secho(f"flashflow: {text}", fg=typer.colors.RED, err=True)

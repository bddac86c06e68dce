"""The command line. What costs time is imported inside the command that needs it, so that mistakes show at once.

Exit codes: 0 done, 1 a run failed, 2 the config or the command is wrong, 130 interrupted, 143 terminated.
"""

import sys
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


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that the run folder holds.")] = False,
) -> None:
    """Train on this machine: every role a process of its own, all stopped together."""
    from flashflow.config import load_config

    if resume and overwrite:
        raise typer.BadParameter("--resume keeps the run and --overwrite replaces it; give one")
    loaded = load_config(config, overrides or [])
    from flashflow.launch.run import train as start

    raise typer.Exit(start(loaded, resume=resume, overwrite=overwrite))


@app.command()
def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Validate a config and print what follows from it; loads no model and starts no process."""
    from flashflow.config import load_config
    from flashflow.launch.check import print_check

    print_check(load_config(config, overrides or []))


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


def _complain(text: str) -> None:
    typer.secho(f"flashflow: {text}", fg=typer.colors.RED, err=True)

"""How fast the simulator is: an hour of 1,024 GPUs with 4,096 environments, on one core.

    python -m benchmarks.simulate [--seconds 3600]

Prints the figures of the simulated run, and appends command, commit, machine and times to results/simulate.jsonl.
Exits with 1 when an hour takes three minutes of CPU or more, which on a core of its own are those of the clock.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.record import ROOT, commit, machine
from flashflow.config import load_config
from flashflow.simulate.figures import Figures
from flashflow.simulate.run import simulate
from flashflow.simulate.table import print_figures

CONFIG = "configs/simulate_1024.yaml"
RESULTS = Path(__file__).resolve().parent / "results" / "simulate.jsonl"
LIMIT_S = 180.0
HOUR_S = 3600.0


def measure(seconds: float) -> dict[str, Any]:
    config = load_config(ROOT / CONFIG, ["run.steps=1000000"])
    wall, cpu = time.monotonic(), time.process_time()
    simulation = simulate(config, seconds=seconds)
    return {
        "command": f"flashflow simulate {CONFIG} --seconds {seconds:g}",
        "commit": commit(),
        "machine": machine(),
        "simulated_s": seconds,
        "wall_s": time.monotonic() - wall,
        "cpu_s": time.process_time() - cpu,
        "figures": msgspec.to_builtins(simulation.figures),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=HOUR_S)
    record = measure(parser.parse_args().seconds)
    console = Console()
    print_figures(msgspec.convert(record["figures"], type=Figures), console)
    console.print(f"{record['simulated_s']:g} s simulated in {record['wall_s']:.1f} s, {record['cpu_s']:.1f} s of CPU")
    with RESULTS.open("a", encoding="utf-8") as results:
        results.write(json.dumps(record) + "\n")
    return 0 if record["cpu_s"] * HOUR_S / record["simulated_s"] < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())

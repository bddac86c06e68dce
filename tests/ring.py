"""A small ring for tests: tiny random model, JSONL sums, a reward that splits groups."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flashflow.config import Config, load_config
from flashflow.topology import FLEET, GANG
from tests.tiny_model import make_tiny_model

REWARDS = '''
import os
from pathlib import Path


def scatter(completion, answer):
    """Anything that a random model gets different values of."""
    return (sum(map(ord, completion)) + int(answer)) % 7 / 6


def some_silent(completion, answer):
    """Every third task gives all its attempts the same reward."""
    return 1.0 if int(answer) % 3 == 0 else scatter(completion, answer)


def constant(completion, answer):
    return 1.0


def stall(completion, answer):
    import time

    if not (flag := Path(__file__).with_name("stalled")).exists():
        flag.touch()
        time.sleep(8)
    return scatter(completion, answer)


def explode(completion, answer):
    if "sum" in answer or len(completion) >= 0:
        raise ZeroDivisionError("the reward function of the test blew up")
    return 0.0
'''


def make_ring(
    folder: Path, *, reward: str = "scatter", tied: bool = True, overrides: dict[str, Any] | None = None
) -> Path:
    """Writes model, data, reward and config into `folder`; returns the path of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(folder / "model", tied=tied)
    rows = [{"prompt": f"{n} plus {n * 7 % 13} is?", "answer": str(n + n * 7 % 13)} for n in range(60)]
    for name, part in (("train", rows[:40]), ("eval", rows[40:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "rewards.py").write_text(REWARDS)
    config = {
        "run": {"name": "r", "folder": str(folder / "runs"), "steps": 4, "seed": 3},
        "model": {"path": str(model), "device": "cpu"},
        "data": {
            "source": {
                "kind": "jsonl",
                "path": str(folder / "train.jsonl"),
                "eval_path": str(folder / "eval.jsonl"),
            }
        },
        "reward": {"function": f"{folder / 'rewards.py'}:{reward}"},
        "sampling": {"max_new_tokens": 12},
        "rollout": {"group_size": 4, "alpha": 0, "concurrency": 16},
        "batch": {"groups": 4, "micro_batch_tokens": 512},
        "optimizer": {"lr": 1e-2},
        "engine": {"slots": 16, "max_context_tokens": 128, "batch_invariant": True},
        "checkpoint": {"every_steps": 2},
    }
    for path, value in (overrides or {}).items():
        section, key = path.split(".")
        config.setdefault(section, {})[key] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def config_of(folder: Path, **changes: Any) -> Config:
    return load_config(make_ring(folder, **changes))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "flashflow", "train", str(config), *arguments]


def train(config: Path, *arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    """The whole ring as processes; never raises for an exit code."""
    return subprocess.run(
        command(config, *arguments), capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False
    )


def metrics(config: Path) -> list[dict[str, Any]]:
    path = load_config(config).run_folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def final_weights(config: Path) -> dict[str, Any]:
    """Name -> tensor, of the newest checkpoint."""
    newest = sorted((load_config(config).run_folder / "checkpoints").iterdir())[-1]
    reader = dcp.FileSystemReader(newest)
    described = reader.read_metadata().state_dict_metadata
    import torch

    state = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in described.items()
        if name.startswith("model.") and isinstance(meta, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def children(pid: int) -> dict[str, int]:
    """Name -> pid of the role processes, and of their nursery, below a running `flashflow train`."""
    import psutil

    names = {process.name(): process.pid for process in psutil.Process(pid).children(recursive=True)}
    return {name: pid for name, pid in names.items() if name.rpartition("-")[0] in FLEET + GANG or name == "nursery"}

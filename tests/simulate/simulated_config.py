"""A config of simulated parts, in a folder of the test."""

from pathlib import Path
from typing import Any

import yaml

from flashflow.config import Config, load_config

BASE: dict[str, Any] = {
    "run": {"name": "r", "steps": 4, "seed": 3},
    "data": {"source": {"kind": "simulated", "prompt_tokens": {"kind": "fixed", "value": 10}}},
    "reward": {"function": "flashflow.simulate.reward:simulated"},
    "sampling": {"max_new_tokens": 400},
    "rollout": {"group_size": 4, "alpha": 1, "concurrency": 16},
    "batch": {"groups": 4},
    "engine": {
        "kind": "simulated",
        "slots": 16,
        "max_context_tokens": 2048,
        "answer_tokens": {"kind": "lognormal", "median": 50, "sigma": 1.0},
        "decode_tokens_per_s": 10,
    },
    "trainer": {"kind": "simulated", "seconds_per_token": 1e-3, "fixed_s": 1.0},
    "checkpoint": {"every_steps": 2},
}


def write_simulated(folder: Path, **overrides: Any) -> Path:
    """`section__key=value` is laid over BASE."""
    values = {section: dict(fields) for section, fields in BASE.items()}
    values["run"]["folder"] = str(folder / "runs")
    for path, value in overrides.items():
        section, key = path.split("__")
        values.setdefault(section, {})[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def simulated_config(folder: Path, **overrides: Any) -> Config:
    return load_config(write_simulated(folder, **overrides))

"""Finds the reward function a config names."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from flashflow.errors import ConfigError
from flashflow.rewards.base import RewardFunction


def load_reward(function: str, arguments: Mapping[str, Any]) -> RewardFunction:
    """From `module:function`, or `file.py:function` with the path relative to the working directory.

    Modules of the working directory, or beside the file, can be imported. Raises ConfigError: an unknown module,
    file or function; a function that cannot be called as a reward. What the module itself raises passes through.
    """
    source, colon, name = function.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError([f"reward.function: {function!r}; expected `module:function` or `file.py:function`"])
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    try:
        found = getattr(module, name)
    except AttributeError:
        near = ", ".join(difflib.get_close_matches(name, vars(module), n=3)) or "none"
        raise ConfigError([f"reward.function: {source} has no {name!r}; nearest: {near}"]) from None
    return RewardFunction(found, arguments, name=function)


def _load_module(name: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError([f"reward.function: no module {error.name!r} (looked from {Path.cwd()})"]) from error
        raise


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError([f"reward.function: no file {path} (looked from {Path.cwd()})"])
    _importable(path.resolve().parent)
    name = f"flashflow_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError([f"reward.function: {path} cannot be imported"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

"""Optional packages, imported where they are used."""

import importlib
from types import ModuleType

from flashflow.errors import ConfigError


def optional_package(module: str, distribution: str, needed_by: str) -> ModuleType:
    """Raises ConfigError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        remedy = f"pip install {distribution}"
        raise ConfigError([f"{needed_by} needs the package {distribution} ({error}): {remedy}"]) from error
